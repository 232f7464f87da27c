"""The preflight: what a run will need later is checked before its model is built, and what is wrong is one line.

| module | what it does |
|---|---|
| mistake | an entry of a table: what is wrong, and its line |
| values | values of flags that no training can have; `s2-megatron inspect` asks here, too |
| flags | flags that are missing, processes, what is loaded |
| schedule | batches, learning rate and weight decay; a resume with another schedule |
| combinations | flags that Megatron takes and fails on later, as a table |
| files | folders that can be written, space for a checkpoint, tokenizer |
| datasets | data: its files, its parts, its tokens |
| start_up | around the start of pretrain_gpt_s2.py, and in `s2-megatron check`: errors become one line and status 2 |

A checkpoint is looked at where it is compared, in prepare_s2 (checkpoints/compare.py). A new check is an entry of
combinations.py or values.py, or a function of flags.py, files.py or datasets.py that raises ValueError:
`SETTING=VALUE: what is wrong; expected ...; do ...`.
"""
