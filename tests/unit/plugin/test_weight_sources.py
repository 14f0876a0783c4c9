"""Where weights come from: each once, whole and cast, copies compared, in buckets."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `train` is not installed")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from miles_plugin.weight_transfer import sources  # noqa: E402
from miles_plugin.weight_transfer.sources import (  # noqa: E402
    CopiesDiffer,
    buckets,
    check_replicas,
    full_parameters,
    named_weights,
    tied_weights,
)
from tests.unit.plugin.test_layout import make_config  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def make_model(tied: bool) -> Any:
    return transformers.Qwen3ForCausalLM(make_config("Qwen3ForCausalLM", tie_word_embeddings=tied))


def from_generator(weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from weights.items()


@pytest.mark.parametrize("kind", [dict, from_generator, lambda weights: list(weights.items())])
def test_weights_come_in_order_and_cast_whatever_yields_them(kind: Any) -> None:
    weights = {"b": torch.randn(3, 2), "a": torch.randn(4, requires_grad=True)}
    given = list(named_weights(kind(weights), BF16))
    assert [name for name, _ in given] == ["b", "a"]
    for name, tensor in given:
        assert tensor.dtype == BF16
        assert not tensor.requires_grad
        assert torch.equal(tensor, weights[name].detach().to(BF16))


@pytest.mark.parametrize(
    "weights_of", [full_parameters, lambda model, dtype: named_weights(dict(model.named_parameters()), dtype)]
)
def test_weights_are_cast_after_they_were_gathered(weights_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that copies are compared as the trainer has them."""
    gathered = []

    def whole(tensor: Any) -> Any:
        gathered.append(tensor.dtype)
        return tensor.detach()

    monkeypatch.setattr(sources, "_whole", whole)
    model = make_model(tied=False)
    parameters = dict(model.named_parameters())
    given = dict(weights_of(model, BF16))
    assert set(gathered) == {F32}
    assert given.keys() == parameters.keys()
    assert all(torch.equal(tensor, parameters[name].detach().to(BF16)) for name, tensor in given.items())


@pytest.mark.parametrize("tied", [False, True])
def test_the_names_that_transformers_ties_are_known(tied: bool) -> None:
    model = make_model(tied)
    assert tied_weights(model) == ({HEAD: EMBEDDING} if tied else {})
    names = [name for name, _ in full_parameters(model, BF16)]
    assert names.count(EMBEDDING) == 1
    assert (HEAD in names) != tied
    assert HEAD in model.state_dict(), "a state dict has both names"
    assert [name for name, _ in named_weights(model.state_dict(), BF16, tied_weights(model))] == names


@pytest.mark.parametrize("differ", [False, True])
def test_parameters_that_were_untied_are_sent_once_and_compared(differ: bool) -> None:
    """An engine reads the embedding in place of the head, whatever the trainer has made of that."""
    model = make_model(tied=True)
    names = [name for name, _ in full_parameters(model, BF16)]
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach() + float(differ))
    assert {EMBEDDING, HEAD} <= dict(model.named_parameters()).keys()
    if not differ:
        assert [name for name, _ in full_parameters(model, BF16)] == names
        return
    with pytest.raises(CopiesDiffer, match=rf"weight {HEAD} must equal {EMBEDDING}, which was sent before it"):
        list(full_parameters(model, BF16))


def test_a_tied_weight_is_sent_once_under_the_name_of_its_original() -> None:
    tensor = torch.randn(4, 4)
    for names in ((EMBEDDING, HEAD), (HEAD, EMBEDDING)):
        sent = list(named_weights(dict.fromkeys(names, tensor), BF16, {HEAD: EMBEDDING}))
        assert [name for name, _ in sent] == [EMBEDDING]


@pytest.mark.parametrize("names", [(EMBEDDING, HEAD), (HEAD, EMBEDDING)])
@pytest.mark.parametrize("kind", [dict, from_generator])
def test_tied_weights_that_differ_are_named_both(names: tuple[str, str], kind: Any) -> None:
    first, second = names
    weights = {first: torch.zeros(4), "other": torch.zeros(4), second: torch.tensor([0.0, 0.0, 1.0, 0.0])}
    with pytest.raises(CopiesDiffer, match=rf"weight {second} must equal {first}, which was sent before it"):
        list(named_weights(kind(weights), BF16, {HEAD: EMBEDDING}))


def test_a_name_that_comes_twice_is_sent_once_and_compared() -> None:
    def twice(change: float) -> Iterable[tuple[str, Any]]:
        return [("w", torch.ones(3)), ("v", torch.ones(3)), ("w", torch.ones(3) + change)]

    assert [name for name, _ in named_weights(twice(0.0), BF16)] == ["w", "v"]
    assert [name for name, _ in named_weights(twice(2**-12), BF16)] == ["w", "v"], "equal as engines get them"
    with pytest.raises(CopiesDiffer, match="weight w must equal w"):
        list(named_weights(twice(0.5), BF16))


def test_nan_equals_itself_and_zero_is_not_minus_zero() -> None:
    broken = torch.tensor([float("nan"), float("inf"), 0.0])
    assert len(list(named_weights([("w", broken), ("w", broken.clone())], BF16))) == 1
    with pytest.raises(CopiesDiffer):
        list(named_weights([("w", torch.zeros(1)), ("w", -torch.zeros(1))], BF16))
    assert sources._same_bits(broken, broken.clone())
    assert not sources._same_bits(torch.zeros(1), -torch.zeros(1))


@pytest.mark.parametrize("tensor", [torch.ones(()), torch.ones(0, 3), torch.randn(4, 6).t(), torch.randn(4, 6)[:, ::2]])
def test_the_digest_is_of_the_elements_however_they_lie(tensor: Any) -> None:
    assert sources.digest_of(tensor) == sources.digest_of(tensor.clone(memory_format=torch.contiguous_format))
    assert sources.digest_of(tensor.to(BF16)) == sources.digest_of(tensor.contiguous().to(BF16))
    check_replicas("without other ranks", tensor)


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 64))
def test_buckets_keep_the_order_and_the_bound(sizes: list[int], most: int) -> None:
    tensors = [(str(index), torch.empty(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    made = list(buckets(iter(tensors), most))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in tensors]
    filled = [sum(tensor.nbytes for _, tensor in bucket) for bucket in made]
    for bucket, nbytes in zip(made, filled, strict=True):
        assert bucket
        assert nbytes <= most or len(bucket) == 1
    for nbytes, following in zip(filled, made[1:], strict=False):
        assert nbytes + following[0][1].nbytes > most, "a bucket is not closed before it is full"


def test_a_bucket_is_handed_on_before_the_next_tensor_but_one_is_gathered() -> None:
    """Not all at once: a model need not fit beside itself."""
    taken = []

    def source() -> Iterator[tuple[str, Any]]:
        for index in range(6):
            taken.append(index)
            yield str(index), torch.empty(10, dtype=torch.uint8)

    made = buckets(source(), 20)
    assert [name for name, _ in next(made)] == ["0", "1"]
    assert taken == [0, 1, 2]
