# The paper's 82M Transformer (Table 4) on 20B tokens of SlimPajama, sequences of 2,048. About 2M
# tokens a step: 32 micro-batches (4 on each of 8 GPUs) * 32 sequences * 2,048 tokens = 2,097,152;
# 10,000 steps = 20.97B, a little more than an epoch. A step takes 13.1 GiB of a GPU, 13.5
# of each of eight, checkpointed 4.0 (counted on a stand-in for a GPU: results/fakegpu).
# $ torchrun --nproc_per_node=8 train.py config/vanilla_82m.py
out_dir = 'out/vanilla_82m'
dataset = 'slimpajama'

n_layer, n_head, n_embd = 8, 8, 512  # FFN 1,792 = 3.5 * 512
vocab_size = 50304  # GPT-NeoX's 50,277, padded to a multiple of 128

block_size = 2048
batch_size = 32
gradient_accumulation_steps = 32  # over all GPUs

max_iters = 10000
learning_rate, min_lr = 6e-4, 6e-5
warmup_iters = 120  # Table 4 and the authors' scripts; the text says 1,200
weight_decay, beta1, beta2, grad_clip = 0.1, 0.9, 0.95, 1.0
