"""How fast a process reads KV out of another's memory: ``python -m sglang_ext.kv_read --help``.

A prefix that another worker holds is worth fetching only if that is much faster than computing it.
One process owns a KV pool in the shape of a model's (a tensor for the keys and one for the values
of each layer), another reads pages out of it without the owner's doing anything (one-sided): by
NIXL's or Mooncake's READ, or by mapping the owner's memory (CUDA IPC) and copying with a kernel.
What arrives is checked.

Runs in SGLang's environment, which has torch and NIXL (Mooncake must be added), and imports neither
SGLang nor the rest of this project. On a CPU it shows that a way works, not how fast it is.
"""
