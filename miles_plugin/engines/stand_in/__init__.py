"""A stand-in for an SGLang server, for the tests of what goes wrong and for benchmarks without a model.

`python -m miles_plugin.engines.stand_in --model DIR` answers the endpoints of SGLang 0.5.23 that this project uses,
with the same status codes and answers. Transport is real: a gloo group, memory registered with a Mooncake Transfer
Engine. There is no transformer: tokens follow from prompt and seed, and take as long as they are told to. It can be
told to fail (`faults.py`), says which weights made each token, and lists the calls it got.
"""
