"""A stand-in for an SGLang server, for the tests of what goes wrong and for benchmarks without a model.

`python -m miles_plugin.engines.stand_in --model DIR` answers the endpoints of SGLang 0.5.23 that this project uses,
with the same status codes and answers. Transport is real: a gloo group, memory registered with a Mooncake Transfer
Engine. There is no transformer: tokens follow from prompt and seed, and take as long as they are told to. It can be
told to fail, and notes what it was asked:

    POST /faults {"path": "/end_weight_update", "do": "drop", "after": 2}    what to do wrong, see `faults.Fault`
    GET, DELETE /faults                                                      what was posted; forget it
    GET /calls                                                               the requests it got, see `faults.Call`

Beside what SGLang says, `meta_info` of a response has `weights_digest`, which weights made which of its tokens:
[{"digest", "policy", "start", "end"}, ...], and `policy`, all values in them. Where every weight is filled with one
number, as tests do, `policy` of a run of tokens is [that number], and has several when an engine serves a mixture.
"""
