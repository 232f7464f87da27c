"""The preflight refuses, before the model is built, settings with which a run would go wrong without a word, hang, or
lose data. An error that Megatron raises before the second iteration becomes one line.

| module | what it does |
|---|---|
| values | values with which a training hangs or computes something else; `s2-megatron inspect` asks here, too |
| mistakes | flags that act without a word, or fail at the first evaluation or checkpoint; folders |
| datasets | data: cut files, parts without a token, tokens of another vocabulary |
| schedule | Megatron's own schedule, gone through before the training |
| start_up | around the start of pretrain_gpt_s2.py, and in `s2-megatron check`: errors become one line and status 2 |

What Megatron says before the second iteration is not checked here: records/status.py makes a line of it, in the words
of errors.py. A new check is an entry of mistakes.py: `SETTING=VALUE: what is wrong; expected ...; do ...`.
"""
