"""Serve a small model with stock SGLang on a machine that has no GPU.

SGLang 0.5.23 imports `triton`, `torchvision` and `sgl_kernel` unconditionally, none of which has a CPU build on
PyPI. This package supplies just enough of them for the torch-native attention path, and only in the processes that
`python -m miles_plugin.engines.sglang_cpu.server` starts: nothing is installed into the environment, so a machine
with a GPU, where `sglang.launch_server` itself is used, never meets this code.

    stubs.py        import-only stand-ins for triton and torchvision, and the finder that serves them
    sgl_kernel.py   the one kernel a CPU run reaches, in torch; every other name raises when called
    hooks.py        functions of SGLang that assume CUDA memory, replaced through SGLang's own hook registry
    server.py       the entry point
"""
