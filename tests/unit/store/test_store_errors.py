"""Typed outcomes: they survive pickling, and every Mooncake code has one."""

import pickle

import pytest

from mooncake_store import codes, errors

CLASSES = [
    errors.StoreError,
    errors.ConfigError,
    errors.MissingDependency,
    errors.StoreUnavailable,
    errors.StoreFull,
    errors.ObjectNotFound,
    errors.ObjectLost,
    errors.IntegrityError,
    errors.StoreClosed,
]
# From the measurements; kept apart from the table under test.
RETRYABLE = {-200, -703, -706, -707, -708, -714, -800, -900, -901, -1010}
FINAL = {-1, -10, -101, -103, -400, -600, -601, -704, -705, -712, -801, -1011, -1012}


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_pickle(cls: type[errors.StoreError]) -> None:
    error = cls("key 'k' is gone", retryable=True, code=-704)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (str(copy), copy.retryable, copy.code) == ("key 'k' is gone", True, -704)


def test_default_retryable() -> None:
    assert {cls for cls in CLASSES if cls("x").retryable} == {errors.StoreUnavailable, errors.StoreFull}


def test_config_error_is_a_value_error() -> None:
    assert issubclass(errors.ConfigError, ValueError)


def test_every_measured_code_has_an_outcome() -> None:
    assert set(codes.OUTCOMES) == RETRYABLE | FINAL


@pytest.mark.parametrize("code", sorted(RETRYABLE | FINAL | {-1700, -1799, -5}))
def test_code_becomes_a_typed_error(code: int) -> None:
    error = codes.error_for(code, "get", "'run/r/b/1'", "look there")
    assert isinstance(error, errors.StoreError)
    assert error.retryable == (code in RETRYABLE)
    assert error.code == code
    for part in ("get", "'run/r/b/1'", str(code), "look there"):
        assert part in str(error)


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (-200, errors.StoreFull),
        (-704, errors.ObjectNotFound),
        (-712, errors.ObjectLost),
        (-801, errors.IntegrityError),
        (-900, errors.StoreUnavailable),
    ],
)
def test_class_of_code(code: int, cls: type[errors.StoreError]) -> None:
    assert type(codes.error_for(code, "put", "k")) is cls
