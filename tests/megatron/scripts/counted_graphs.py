"""pretrain_gpt_s2.py that says at its end how many CUDA graphs were replayed, by whomever."""


def main():
    import torch

    import pretrain_gpt_s2

    count, replay = 0, torch.cuda.CUDAGraph.replay

    def counted(graph):
        nonlocal count
        count += 1
        return replay(graph)

    torch.cuda.CUDAGraph.replay = counted
    pretrain_gpt_s2.main()
    print(f"graph replays: {count}", flush=True)


if __name__ == "__main__":
    main()
