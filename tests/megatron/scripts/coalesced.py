"""Two ranks, the second one late: what a coalesced, asynchronous all-gather has written when its `with` ends."""

import os
import time

LATE = 1.0  # seconds


def main():
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    whole, shard = torch.zeros(64), torch.full((32,), rank + 1.0)
    dist.barrier()
    time.sleep(LATE * rank)
    with dist._coalescing_manager(async_ops=True) as handle:
        dist.all_gather_into_tensor(whole, shard, async_op=True)
    written = whole.clone()
    handle.wait()
    whole.untyped_storage().resize_(0)
    print(f"\nrank {rank} found {sorted(set(written.tolist()))}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
