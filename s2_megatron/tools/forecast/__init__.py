"""What a training step will take and hold before it has run: FLOPs, time and memory of one GPU, from a launch line.

The time of a step is a sum of parts, each from what was measured or counted (step_time.py):

- attention: time per attended (query, key) pair in the kernels' benchmark tables, interpolated (tables.py);
- linear layers: their FLOPs at one fitted rate, those that recomputation repeats included;
- everything else that touches activations (norms, RoPE, SwiGLU, residuals, cross entropy) and the optimizer: their
  bytes at one fitted rate;
- communication: the bytes of the context-parallel exchange plan at the measured cost per byte, those of tensor and data
  parallelism at the measured rate of the interconnect.

The memory of a GPU is counted tensor by tensor (memory.py); nothing is fitted there.

Two numbers are fitted, the FLOP rate and the byte rate, on whole training steps (`benchmarks/forecast_tables.py`). It
writes the tables of one kind of GPU, a JSON file beside this one, from `benchmarks/results`. A test leaves every
measured step out of the fit and compares its forecast: step time within 15 %, peak memory within 10 %.
"""
