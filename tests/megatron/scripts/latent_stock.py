"""pretrain_gpt_s2.py with Megatron's own local core attention in multi-latent attention. It computes values of another
head dim than queries and keys; only its constructor does not take the two head dims, and counts with one."""


def main():
    import pretrain_gpt_s2
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    build = DotProductAttention.__init__

    def build_latent(self, *args, k_channels=None, v_channels=None, **kwargs):
        build(self, *args, **kwargs)
        if v_channels is not None:  # Megatron builds one of the usual attention first, and drops it
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = build_latent
    pretrain_gpt_s2.main()


if __name__ == "__main__":
    main()
