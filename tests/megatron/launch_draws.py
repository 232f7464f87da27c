"""Launch flags of a tiny GPT drawn at random, for launch_trial.py: settings that act on each other, in groups, and any
flag of Megatron's own parser.

A change is {flag: its words, or None for a flag that is to be left out}; what stands together in one change is drawn
together.
"""

from __future__ import annotations

import argparse
import random
from functools import cache

Change = dict[str, list[str] | None]

# Two layers, trained for three iterations of four samples, evaluated and saved after the second and at the end.
BASE = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --normalization
    RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --make-vocab-size-divisible-by 32 --transformer-impl local --no-persist-layer-norm
    --no-rope-fusion --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --micro-batch-size 1
    --global-batch-size 4 --train-iters 3 --lr 1e-3 --log-interval 1 --eval-iters 1 --eval-interval 2 --num-workers
    0 --no-create-attention-mask-in-dataloader --distributed-backend gloo --tokenizer-type NullTokenizer
    --vocab-size 127 --data-path {lab}/corpus --split 90,5,5 --data-cache-path {lab}/cache --s2-config
    {lab}/sparsity.yaml --save {run}/checkpoints --save-interval 2
"""

# Settings of one topic, with a semicolon between them: `--flag a|b c` is a flag with one of these values, one of them
# of two words; `-flag` leaves a flag out. What stands behind a + belongs to the change before it.
GROUPS = {
    "learning rate": """
        --lr 0|1e-3|1|-1e-3|nan|inf ; --min-lr 0|1e-4|1e-3|1e-2|2|-1e-4|nan ; --lr-warmup-iters 0|1|2|3|4|2000 ;
        --lr-warmup-fraction 0|0.01|0.5|0.999|1|1.5|-0.5|nan ; --lr-warmup-samples 0|4|8|12|13|20000|-4 ;
        --lr-warmup-init 0|1e-4|1e-3|1|-1 ; --lr-decay-style constant|linear|cosine|inverse-square-root|WSD ;
        --lr-decay-iters 1|2|3|100 ; --lr-decay-samples 1|8|12|100|-1|0 ; --lr-wsd-decay-iters 0|1|2|3|4|100|-1 ;
        --lr-wsd-decay-samples 0|4|12|100|-1 ; --lr-wsd-decay-style exponential|linear|cosine|minus_sqrt ;
        --decoupled-lr 0|1e-3|1|-1 ; --decoupled-min-lr 0|1e-3|1|-1 ; --override-opt-param-scheduler ;
        --use-checkpoint-opt-param-scheduler ; --train-samples 12|13|3|1 + -train-iters
    """,
    "weight decay": """
        --weight-decay 0|0.1|-0.1|nan|1e30 ; --start-weight-decay 0|0.1|-0.1 ; --end-weight-decay 0|0.1|0.2|-0.1 ;
        --weight-decay-incr-style constant|linear|cosine ; --apply-wd-to-qk-layernorm ; --qk-layernorm ;
        --no-weight-decay-cond-type apply_wd_to_qk_layernorm ; --clip-grad 0|1|-1|1e-30|nan
    """,
    "batches": """
        --micro-batch-size 1|2|3|4|8 ; --global-batch-size 1|2|3|4|6|8|64 ; -global-batch-size ;
        --rampup-batch-size 2 2 6|1 1 12|4 0 8|0 2 8|2 3 8|8 2 12|2 2 0|4 4 -5|2 2 1000000|2 2 3 ;
        --step-batch-size-schedule 0:2,256:4|0:4|4:4|0:4,256:2|x|0:3|0:2,1M:4|0:4,1M:3 ;
        --train-samples 4|12|13|16|3|1 + -train-iters ; --decrease-batch-size-if-needed ;
        --eval-global-batch-size 1|2|3|4|8|0|-1 ; --eval-micro-batch-size 1|2|3|4|0|-1 ; --calculate-per-token-loss ;
        --iterations-to-skip 1|1 2 3|2|100|-1 ; --lr-decay-samples 100
    """,
    "evaluation": """
        --eval-iters 0|1|2|50|1000 ; --eval-interval 1|2|3|100 ; --start-eval-at-iter 0|1|3|100|-1 ;
        --full-validation ; --multiple-validation-sets ; --validation-set-names a|a b ; --skip-train ; --test-mode ;
        --eval-global-batch-size 1|4|8|6 ; --eval-micro-batch-size 1|2|4 ;
        --split 90,5,5|100,0,0|1|99,1,0|50,50,0|99.9,0.1,0|0.5,0.5|90,0,10|1e-9,1,1|100,1e-9,0 ;
        --train-iters 1|2|3|4 ; --exit-interval 1|2|5 ; --log-validation-ppl-to-tensorboard ;
        --tensorboard-dir {run}/tensorboard ; --dataloader-type single|cyclic|external ;
        --s2-position-loss 1|8|3|64|65
    """,
    "optimizer": """
        --optimizer adam|sgd|muon|dist_muon|lion|soap|adaptive_muon ; --adam-beta1 0|0.9|1|-0.1|2|nan ;
        --adam-beta2 0|0.95|1|-0.1|2 ; --adam-eps 0|1e-8|-1|1 ; --sgd-momentum 0|0.9|1|-1|2 ;
        --lion-beta1 0|0.95|1|-1|2 ; --lion-beta2 0|0.95|1|-1|2 ; --muon-momentum 0|0.9|1|-1|2 ; --muon-no-split-qkv ;
        --muon-nesterov ; --muon-scale-mode spectral|unit_rms_norm|shape_scaling ;
        --muon-fp32-matmul-prec low|medium|high ; --muon-coefficient-type quintic|simple|x ;
        --muon-num-ns-steps 0|1|5|-1 ; --muon-tp-mode blockwise|duplicated|distributed ;
        --muon-scalar-optimizer adam|lion ; --use-distributed-optimizer + --no-save-optim ;
        --use-distributed-optimizer + -save + -save-interval ; --use-precision-aware-optimizer ;
        --optimizer-cpu-offload ; --optimizer-offload-fraction 0|0.5|1|2|-1 ; --use-torch-optimizer-for-cpu-offload ;
        --overlap-cpu-optimizer-d2h-h2d ; --optimizer-cuda-graph ; --freeze-all-layers ;
        --dump-param-to-param-group-map {run}/map.json ; --check-for-large-grads ; --load-main-params-from-ckpt ;
        --log-num-zeros-in-grad ; --log-params-norm ; --save-params-interval 1|2|0|-1 ;
        --save-wgrads-interval 1|2|0|-1 ; --save-dgrads-interval 1|2|0|-1 ; --save-activations-interval 1|0|-1 ;
        --save-tokens-per-expert-interval 1
    """,
    "precision": """
        --bf16 ; --fp16 ; --bf16 + --no-masked-softmax-fusion ; --fp16 + --no-masked-softmax-fusion ;
        --fp16 + --s2-dense-core s2 ; --bf16 + --s2-dense-core s2 ; --loss-scale 1|128|0|-1|nan ;
        --initial-loss-scale 1|65536|0|-1|4294967296 ; --min-loss-scale 1|0|-1|1e12 ;
        --loss-scale-window 1|1000|0|-1|0.5 ; --hysteresis 1|2|0|-1 ; --attention-softmax-in-fp32 ;
        --apply-query-key-layer-scaling ; --accumulate-allreduce-grads-in-fp32 ; --grad-reduce-in-bf16 ;
        --fp16-lm-cross-entropy ; --fp32-residual-connection ; --main-grads-dtype fp32|bf16 ;
        --main-params-dtype fp32|fp16 ; --exp-avg-dtype fp32|fp16|bf16|fp8 ; --exp-avg-sq-dtype fp32|fp16|bf16|fp8 ;
        --use-precision-aware-optimizer + --use-distributed-optimizer + --no-save-optim ;
        --use-distributed-optimizer + --no-save-optim ; --disable-bf16-reduced-precision-matmul ;
        --fp8-format hybrid|e4m3 ; --fp4-format e2m1 ; --fp8-param-gather ; --cross-entropy-loss-fusion ;
        --cross-entropy-fusion-impl native|te ; --no-check-for-nan-in-loss-and-grad ; --first-last-layers-bf16 ;
        --deterministic-mode
    """,
    "model": """
        -swiglu ; --squared-relu + -swiglu ; --openai-gelu + -swiglu ; --quick-geglu + -swiglu ; --squared-relu ;
        --quick-geglu ; --onnx-safe True ; --glu-linear-offset 0|1|-1 ; --activation-func-clamp-value 0|1|-1|7 ;
        --use-fused-weighted-squared-relu ; --no-bias-gelu-fusion ; -no-bias-swiglu-fusion ; -disable-bias-linear ;
        -disable-bias-linear + -no-bias-swiglu-fusion ; --add-qkv-bias ; --normalization LayerNorm|RMSNorm ;
        --apply-layernorm-1p ; -no-persist-layer-norm ; --norm-epsilon 0|1e-5|-1|1 ;
        --apply-residual-connection-post-layernorm ; --fused-residual-rmsnorm ; --qk-layernorm ; --qk-l2-norm ;
        --attention-output-gate ; --init-method-std 0|0.02|-1|10|nan ; --init-method-xavier-uniform ;
        --embedding-init-method-std 0|0.02|-1 ; --use-mup ; --mup-width-mult 0|1|2|-1 ;
        --mup-base-hidden-size 0|16|32|-1 ; --mup-embedding-mult 0|2 ; --mup-output-mult 0|2 ;
        --mup-base-head-dim 0|8|-1 ; --mup-attn-scale-power 0|0.5|1 ; --hidden-dropout 0|0.1|1|-0.1|1.5 ;
        -untie-embeddings-and-output-weights ; --make-vocab-size-divisible-by 1|7|128 ; --disable-pad-vocab-size ;
        --padded-vocab-size 128|127|64|0|-1 ; --use-cpu-initialization ; --no-initialization ;
        --init-model-with-meta-device ; --ffn-hidden-size 1|63|64 ; -ffn-hidden-size ; --hidden-size 30|33|4|32 ;
        --kv-channels 1|3|8|32 ; --mlp-chunks-for-training 0|1|3|-1 ; --num-layers 1|3|4 ; --use-te-activation-func ;
        --no-bias-dropout-fusion ; --transformer-impl local|transformer_engine|inference_optimized ;
        --spec local|megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec ; -s2-config ;
        --s2-dense-core stock|s2|auto ; --s2-backend reference|triton|gluon ; --mtp-num-layers 0|1|2 ;
        --mtp-loss-scaling-factor 0|-1|0.3 ; --mtp-use-repeated-layer ; --mtp-detach-heads ;
        --heterogeneous-layers-config-path {run}/none
    """,
    "positions": """
        --position-embedding-type learned_absolute|rope|yarn|mrope|relative|none ;
        --rotary-base 0|1|10000|-1|1000000000 ; --rotary-percent 0|0.1|0.3|0.5|1|2|-1 ; --rotary-interleaved ;
        --rotary-seq-len-interpolation-factor 0|1|2|-1 ; --use-rope-scaling ; --rope-scaling-factor 0|1|8|-1 ;
        --use-rotary-position-embeddings ; --no-position-embedding ; --rope-type rope|yarn ;
        --no-rope-freq 0|1|2|3|[0,1]|[1]|([1]+[0])*1|x ; --mrope-section 1 1 2|4 4 ;
        --yarn-original-max-position-embeddings 0|32|64 ; --yarn-beta-fast 0|32 ; --yarn-beta-slow 0|1 ;
        --rotary-scaling-factor 0|1|2|-1 ; --mscale 0|1 ; --mscale-all-dim 0|1 ;
        --max-position-embeddings 1|63|64|65|4096 ; --seq-length 1|2|16|48|60|64|65|128 ; --kv-channels 1|2|7|8|16 ;
        -no-rope-fusion ; --apply-rope-fusion ; -s2-config
    """,
    "heads": """
        --num-attention-heads 1|2|3|4|8|16|32|64 ; --num-query-groups 1|2|3|4|8 ; -group-query-attention ;
        -group-query-attention + -num-query-groups ; -num-query-groups ; --kv-channels 1|8|256|257 ;
        --multi-latent-attention ; --q-lora-rank 8 ; --kv-lora-rank 8 ;
        --qk-head-dim 8 + --qk-pos-emb-head-dim 8 + --v-head-dim 8 ;
        --experimental-attention-variant gated_delta_net|dsa ; --linear-attention-freq 2 ;
        --window-size 16,0|(16,0)|[16,0] ; --window-attn-skip-freq 2 ;
        --s2-config window-size ; --s2-config window-size + --window-size 16,0|0,0|(-1,0)|16,1|16 ;
        --s2-config window-size + --window-size 16,0 + --window-attn-skip-freq 1|2|-1|[1,0]|[1,0,1,0] ;
        --softmax-type vanilla|off-by-one|learnable ;
        --attention-backend flash|fused|unfused|auto|local ; --use-flash-attn ; --flash-attention-version 2|3|4 ;
        --qk-clip ; --log-max-attention-logit ; -s2-config
    """,
    "experts": """
        --num-experts 0|1|2|3|4 ; --moe-layer-freq 1|2|0|3|[0,1]|([0]*1+[1]*1)|[1] ; --moe-ffn-hidden-size 16|0|7 ;
        --moe-router-topk 0|1|2|4|5|-1 ;
        --moe-router-load-balancing-type aux_loss|seq_aux_loss|global_aux_loss|sinkhorn|quantile_balancing|none ;
        --moe-router-load-balancing-type aux_loss seq_aux_loss ; --moe-aux-loss-coeff 0|0.01|-1|0.01 0.02 ;
        --moe-z-loss-coeff 0|0.001 ; --moe-input-jitter-eps 0|0.01|2 ;
        --moe-token-dispatcher-type allgather|alltoall|flex ; --moe-flex-dispatcher-backend deepep|hybridep|ncclep ;
        --moe-enable-deepep ; --moe-expert-capacity-factor 0|0.5|1|2|-1 ; --moe-pad-expert-input-to-capacity ;
        --moe-token-drop-policy probs|position ; --moe-grouped-gemm ; --moe-shared-expert-intermediate-size 16|0 ;
        --moe-shared-expert-gate ; --moe-shared-expert-overlap ; --moe-router-pre-softmax ;
        --moe-router-score-function softmax|sigmoid|sqrtsoftplus ; --moe-router-num-groups 1|2|3 ;
        --moe-router-group-topk 1|2|3 ; --moe-router-topk-scaling-factor 0|2 ; --moe-router-dtype fp32|fp64 ;
        --moe-router-enable-expert-bias ; --moe-router-bias-update-rate 0|0.1 ; --moe-router-force-load-balancing ;
        --moe-router-force-biased 0|1 ; --moe-permute-fusion ; --moe-router-fusion ; --moe-apply-probs-on-input ;
        --moe-layer-recompute ; --moe-latent-size 8|0 ; --moe-per-layer-logging ; --moe-use-upcycling ;
        --moe-upcycling-granularity 1|2|0 ; --moe-enable-routing-replay ; --moe-router-padding-for-quantization ;
        --moe-routing-trace-path {run}/trace ; -disable-bias-linear ; --use-grouped-gemm-for-dense-mlp ;
        --use-grouped-gemm-for-shared-expert
    """,
    "recomputation": """
        --recompute-granularity full|selective ; --recompute-method uniform|block ;
        --recompute-num-layers 0|1|2|3|-1 ;
        --recompute-modules core_attn|moe_act|layernorm|mlp|moe|mla_up_proj|shared_experts|x|core_attn mlp ;
        --recompute-activations ; --checkpoint-activations ; --distribute-saved-activations ;
        --s2-keep-attention-output ; --fine-grained-activation-offloading ;
        --offload-modules core_attn|attn_norm|qkv_linear|mlp_norm|x ; --cpu-offloading-num-layers 0|1|2|-1 ;
        --num-layers 1|2|4 ; --cuda-graph-impl none|local|transformer_engine|full_iteration ;
        --cuda-graph-modules attn|mlp ; --enable-cuda-graph ; --external-cuda-graph ; --mtp-num-layers 1 ; -s2-config
    """,
    "parallel": """
        --use-distributed-optimizer + --no-save-optim ; --use-distributed-optimizer + -save + -save-interval ;
        --overlap-grad-reduce ; --overlap-param-gather ; --overlap-param-gather-with-optimizer-step ;
        --ddp-bucket-size 0|1|1000|-1 ; --ddp-num-buckets 0|1|3|-1 ; --ddp-pad-buckets-for-high-nccl-busbw ;
        --ddp-reduce-scatter-with-fp32-accumulation ; --ddp-average-in-collective ; --no-align-param-gather ;
        --use-nccl-ub ; --use-megatron-fsdp ; --use-megatron-fsdp + -save + -save-interval ; --use-torch-fsdp2 ;
        --use-torch-fsdp2 + --no-save-optim ;
        --data-parallel-sharding-strategy no_shard|optim|optim_grads|optim_grads_params ;
        --num-distributed-optimizer-instances 0|1|2|-1 ; --no-gradient-reduce-div-fusion ;
        --tensor-model-parallel-size 1|2 ; --sequence-parallel ; --pipeline-model-parallel-size 1|2 ;
        --num-layers-per-virtual-pipeline-stage 1|0|2|-1 ; --num-virtual-stages-per-pipeline-rank 1|2|0 ;
        --decoder-first-pipeline-num-layers 1|0|2 ; --decoder-last-pipeline-num-layers 1|0|2 ;
        --pipeline-model-parallel-layout Ettt|L|Et|tL|x|E|t|L ; --account-for-embedding-in-pipeline-split ;
        --account-for-loss-in-pipeline-split ; --microbatch-group-size-per-virtual-pipeline-stage 1|2|0 ;
        --context-parallel-size 1|2 ; --cp-comm-type p2p|a2a|all_gather|a2a+p2p|x ;
        --s2-cp-comm-type sparse|all_gather|a2a|sparse a2a ; --s2-cp-keep-received ;
        --expert-model-parallel-size 1|2 ; --expert-tensor-parallel-size 1|2|0 ; --num-experts 2 ;
        --use-tp-pp-dp-mapping ; --disable-gloo-process-groups ; --delay-wgrad-compute ;
        --defer-embedding-wgrad-compute ; --wgrad-deferral-limit 0|1|-1 ; --high-priority-stream-groups ep|x ;
        --disable-align-grad-reduce ; --data-parallel-random-init ;
        --check-weight-hash-across-dp-replicas-interval 1|0|-1 ; --gpu-sniff-test-interval 1|0|-1 ;
        --train-sync-interval 1|0|-1 ; --distributed-timeout-seconds-after-init 1|60|0|-1 ; --lazy-mpu-init ;
        --tp-comm-overlap ; --no-overlap-p2p-communication ; --dataloader-inter-document-masking ;
        --mtp-num-layers 1 ; --micro-batch-size 1|2 ; --global-batch-size 2|4|8 ; --num-layers 4
    """,
    "checkpoints": """
        --ckpt-format torch|torch_dist|torch_dcp|fsdp_dtensor ; --async-save ; --async-save + --async-strategy mcore ;
        --use-persistent-ckpt-worker ; --async-ckpt-use-cpu-shm ; --async-ckpt-cpu-priority 0|19|20|-20|100 ;
        --async-ckpt-io-priority 0|3|4|-1 ; --load {lab}/start|{run}/none|{run}/checkpoints ; --finetune ;
        --pretrained-checkpoint {lab}/start|{run}/none ; --ckpt-step 2|3|1|7 ; --no-load-optim ; --no-load-rng ;
        --no-save-optim ; --no-save-rng ; --use-checkpoint-args ; --use-mp-args-from-checkpoint-args ;
        --exit-on-missing-checkpoint ; --auto-detect-ckpt-format ; --override-opt-param-scheduler ;
        --use-checkpoint-opt-param-scheduler ; --train-iters 3|4|5|6 ; --save-interval 1|2|3|100 ;
        --persistent-save-interval 1|3|0|-1 ; --save-retain-interval 1|2|3|4|0|-1 ;
        --non-persistent-save-interval 1|2|3|0|-1 ; --non-persistent-ckpt-type global|local|in_memory ;
        --non-persistent-global-ckpt-dir {run}/global ; --non-persistent-local-ckpt-dir {run}/local ;
        --non-persistent-local-ckpt-algo fully_parallel|atomic ; --replication ; --replication-jump 1|0|-1 ;
        --replication-factor 1|2|0 ; --no-ckpt-fully-parallel-save ; --ckpt-fully-parallel-load ;
        --ckpt-fully-parallel-load-exchange-algo broadcast|gather_rounds|gather_object ;
        --ckpt-assume-constant-structure ;
        --dist-ckpt-strictness assume_ok_unexpected|log_all|raise_all|return_all|ignore_all ;
        --dist-ckpt-save-pre-mcore-014 ; --dist-ckpt-optim-fully-reshardable ; --dist-ckpt-format zarr|torch_dist ;
        --dist-ckpt-workers 0|1|2|-1 ; --use-dist-ckpt ; --ckpt-convert-format torch|torch_dist ;
        --ckpt-convert-save {run}/converted ; --override-ckpt-iteration 0|7|-1 ; --verify-integrity ;
        --load-main-params-from-ckpt ; --lr 1e-3|1e-2 ; --lr-decay-style constant|cosine ; --s2-no-checksums ;
        --s2-allow-sparsity-change ; -s2-config ; -save ; -save + -save-interval ; --bf16 + --no-masked-softmax-fusion
    """,
    "logs": """
        --log-interval 1|2|100 ; --log-throughput ; --log-progress ; --log-params-norm ; --log-num-zeros-in-grad ;
        --log-energy ; --log-device-memory-used ; --log-memory-interval 0|1|2|-1 ; --timing-log-level 0|1|2 ;
        --timing-log-option max|minmax|all ; --no-barrier-with-level-1-timing ; --tensorboard-dir {run}/tensorboard ;
        --tensorboard-log-interval 1|2|100 ; --tensorboard-queue-size 1|0|-1 ; --log-timers-to-tensorboard ;
        --log-validation-ppl-to-tensorboard ; --log-memory-to-tensorboard ; --log-world-size-to-tensorboard ;
        --disable-log-loss-scale-to-tensorboard ; --wandb-project p ; --wandb-exp-name n ;
        --logging-level 0|10|20|-1|1000 ; --log-straggler ; --straggler-ctrlr-port 0|-1|65535|100000 ;
        --straggler-minmax-count 0|1|3|-1 ; --disable-straggler-on-startup ;
        --result-rejected-tracker-filename {run}/rejected|{run}/none/rejected ; --check-for-spiky-loss ;
        --rerun-mode disabled|validate_results|report_stats ; --error-injection-rate 0 ;
        --error-injection-type correct_result|transient_error|persistent_error ;
        --config-logger-dir {run}/config_log ; --s2-loss-from-token 0|5|126|127|1000 ; --s2-position-loss 8|64 ;
        --no-one-logger ; --one-logger-project x ; --logits-save-dir {run}/logits + --logits-save-top-k 2 ;
        --logits-save-top-p 0.5|2|-1 ; --logits-load-dir {run}/none ; --run-workload-inspector-server ; --skip-train
    """,
    "data": """
        --mock-data ; --mock-data + -data-path ;
        --train-data-path {lab}/corpus + --valid-data-path {lab}/corpus + --test-data-path {lab}/corpus + -data-path
            + -split ; --train-data-path {lab}/corpus + -data-path + -split ;
        --train-data-path {lab}/corpus + --valid-data-path {lab}/corpus + -data-path + -split ;
        --data-path 0.5 {lab}/corpus 0.5 {lab}/corpus|0 {lab}/corpus|-1 {lab}/corpus|{lab}/corpus {lab}/corpus|
            1e-9 {lab}/corpus|nan {lab}/corpus ; --data-args-path {lab}/data_args ;
        --data-args-path {lab}/data_args + -data-path ; --per-split-data-args-path {lab}/splits.json ;
        --per-split-data-args-path {lab}/splits.json + -data-path + -split ;
        --per-dataset-sequences-path {lab}/sequences.json|{lab}/sparsity.yaml|{run}/none ;
        --split 90,5,5|1,1,1|100,0,0|1|99,0,1|0.9,0.1|33.3,33.3,33.4 ; -split ; -data-cache-path ;
        --dataloader-type single|cyclic|external ; --dataloader-fast-cache-load + --data-cache-path {run}/cache ;
        --dataloader-defer-npy-index-mmap + --data-cache-path {run}/cache ;
        --dataloader-inter-document-masking ; --no-data-sharding ; --no-mmap-bin-files ;
        --num-dataset-builder-threads 0|1|2|-1 ; --mid-level-dataset-surplus 0|0.005|-1|1 ;
        --object-storage-cache-path {run}/objects ; --reset-position-ids ; --reset-attention-mask ; --eod-mask-loss ;
        -no-create-attention-mask-in-dataloader ; --allow-ambiguous-pad-tokens ; --fim-data ; --fim-rate 0|0.5|1|2 ;
        --sft ; --seed 1|2147483647 ; --train-iters 3|1 ; --micro-batch-size 1|4 ; --seq-length 16|64|128 ;
        --multiple-validation-sets ; --full-validation ; --phase-transition-iterations 1|2|0|100|x ;
        --s2-position-loss 8 ; --s2-loss-from-token 5|126 ; --exit-signal-handler-for-dataloader ; -s2-config
    """,
    "tokenizer": """
        --tokenizer-type NullTokenizer|NullMultimodalTokenizer|MultimodalTokenizer|GPT2BPETokenizer|
            SentencePieceTokenizer|GPTSentencePieceTokenizer|HuggingFaceTokenizer|TikTokenizer|SFTTokenizer|
            BertWordPieceLowerCase|Llama2Tokenizer|ByteLevelTokenizer ; -tokenizer-type ;
        --tokenizer-model {lab}/tokenizer|{lab}/tokenizer/tokenizer.json|{run}/none|{lab}/corpus.bin|gpt2 ;
        --tokenizer-type HuggingFaceTokenizer + --tokenizer-model {lab}/tokenizer ;
        --tokenizer-type SFTTokenizer + --tokenizer-model {lab}/tokenizer ;
        --tokenizer-type TikTokenizer + --tokenizer-model {lab}/tokenizer/tokenizer.json|{lab}/corpus.idx ;
        --tokenizer-type SentencePieceTokenizer + --tokenizer-model {lab}/corpus.idx ;
        --tokenizer-type HuggingFaceTokenizer + --tokenizer-model {lab}/tokenizer + -vocab-size ;
        --tokenizer-metadata {run}/none|{}|{"library":"huggingface"}|x ; --tokenizer-special-tokens a|a b ;
        --tokenizer-hf-no-use-fast ; --tokenizer-hf-no-include-special-tokens ; --trust-remote-code ;
        --vocab-size 1|2|100|126|127|128|1000|0 ; -vocab-size ; --vocab-extra-ids 0|5|-1 ;
        --null-tokenizer-eod-id 0|126|127|1000|-1 ; --null-tokenizer-pad-id 0|126|1000|-1 ;
        --make-vocab-size-divisible-by 1|32|100 ; --padded-vocab-size 128|256|64 ; --vocab-file {run}/none ;
        --merge-file {run}/none ; --mock-data + -data-path ; --chat-template x ; --tiktoken-pattern v1|v2 ;
        --tiktoken-num-special-tokens 0|1000|-1 ; --sft ; --eod-mask-loss ; --reset-position-ids ;
        --dataloader-inter-document-masking ; --s2-loss-from-token 5
    """,
    "ends": """
        --exit-interval 1|2|3|5 ; --exit-duration-in-mins 1|100 ; --exit-signal-handler ;
        --exit-signal SIGTERM|SIGINT|SIGUSR1|SIGKILL|SIGUSR2|x ; --exit-signal-handler-for-dataloader ;
        --exit-signal-handler-for-training ; --adlr-autoresume ; --adlr-autoresume-interval 0|1|-1 ; --profile ;
        --use-pytorch-profiler ; --profile-step-start 0|1|2|10|-1 ; --profile-step-end 0|1|2|3|12|-1 ;
        --profile-ranks 0|1|-1|7 ; --pytorch-profiler-collect-shapes ; --pytorch-profiler-collect-callstack ;
        --pytorch-profiler-collect-chakra ; --record-memory-history ; --memory-snapshot-path {run}/snapshot ;
        --nvtx-ranges ; --record-shapes ; --tensorboard-dir {run}/tensorboard ; --manual-gc ;
        --manual-gc-interval 0|1|2|-1 ; --disable-manual-gc-eval ; --empty-unused-memory-level 0|1|2 ;
        --rerun-mode disabled|validate_results|report_stats ; --inprocess-restart ; --enable-ft-package ;
        --calc-ft-timeouts ; --ft-num-warmup-iters 0|1|-1 ; --distributed-timeout-minutes 1|10 ;
        --distributed-timeout-seconds-after-init 60|1|0|-1 ; --flight-recorder-dump-path {run}/recorder ;
        --flight-recorder-trace-buffer-size 0|1|2000|-1 ; --fault-injector-ranks 0 ; --fault-injector-fault-types x ;
        --enable-experimental ; --enable-msc ; --disable-msc ; --disable-jit-fuser ; --te-rng-tracker ;
        --inference-rng-tracker ; --use-mcore-models ; --local-rank 0|1|-1 ;
        --nccl-communicator-config-path {run}/none ; --use-sharp ; --skip-train ; --train-iters 1|2
    """,
}  # fmt: skip


def read_changes(text: str) -> list[list[Change]]:
    """Of a group: for each setting every change that it can be."""
    found = []
    for item in " ".join(text.split()).replace("| ", "|").split(" ;"):
        parts = [part.strip() for part in item.split(" + ")]
        changes: list[Change] = [{}]
        for part in parts:
            flag, _, values = part.partition(" ")
            if not flag.startswith("--"):
                words: list[list[str] | None] = [None]
            elif not values:
                words = [[]]
            else:
                words = [value.split() for value in values.split("|")]
            changes = [{**change, "--" + flag.lstrip("-"): word} for change in changes for word in words]
        found.append(changes)
    return found


@cache
def parser_changes() -> list[list[Change]]:
    """Every flag of Megatron's and of this package: what its values can be, edge values among them."""
    from megatron.training.arguments import add_megatron_arguments

    from s2_megatron.megatron.arguments import add_s2_arguments

    parser = add_s2_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    found = []
    for action in parser._actions:
        flag = action.option_strings[-1] if action.option_strings else ""
        if not flag or flag in NOT_DRAWN:
            continue
        if action.nargs == 0:
            values = [[]]
        elif action.choices:
            values = [[getattr(choice, "name", str(choice))] for choice in action.choices]
        elif action.type is int:
            values = [[word] for word in ("0", "1", "2", "3", "7", "-1")]
        elif action.type is float:
            values = [[word] for word in ("0", "0.5", "1", "2", "-1", "nan")]
        else:
            values = [["{run}/none"], ["1"], ["x"], ["0", "1"] if action.nargs in ("+", "*") else ["[0,1]"]]
        found.append([{flag: words} for words in values])
    return found


# Given by the base, or none of a training's.
NOT_DRAWN = {"-h", "--help", "--s2-config", "--s2-traceback", "--s2-loss-log", "--data-cache-path", "--local-rank"}
# Whether these train depends on what an earlier run left in the cache, which the check sees only the presence of.
NOT_DRAWN |= {"--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap"}


def draw(choice: random.Random, name: str | None = None) -> tuple[str, int, list[Change]]:
    """(the group's name, processes, changes). name: of a group, "any flag" or "two groups"; default drawn as well."""
    name = name or choice.choice([*GROUPS, "any flag", "any flag", "two groups"])
    if name == "any flag":
        lines = choice.sample(parser_changes(), 5)
    else:
        names = choice.sample(list(GROUPS), 2) if name == "two groups" else [name]
        known = [line for each in names for line in read_changes(GROUPS[each])]
        lines = choice.sample(known, min(len(known), choice.choice((1, 2, 2, 3, 3, 4, 5))))
    processes = 2 if choice.random() < (0.7 if name == "parallel" else 0.1) else 1
    return name, processes, [choice.choice(line) for line in lines]


def base_flags(lab: str, run: str) -> Change:
    """BASE as a change. lab, run: folders of the trial and of one run."""
    found: Change = {}
    flag = ""
    for word in BASE.replace("{lab}", lab).replace("{run}", run).split():
        if word.startswith("--"):
            flag, found[word] = word, []
        else:
            found[flag].append(word)
    return found


def command_line(changes: list[Change], lab: str, run: str) -> list[str]:
    flags = base_flags(lab, run)
    for change in changes:
        flags |= change
    words = [word for flag, values in flags.items() if values is not None for word in (flag, *values)]
    return [word.replace("{lab}", lab).replace("{run}", run) for word in words]
