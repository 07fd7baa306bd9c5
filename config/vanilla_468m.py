# The paper's 468M Transformer (Table 4), otherwise as at 82M. A step takes 49 to 50 GiB of a
# GPU, 51 to 55 of each of eight, with batch_size=16 26.5, with 8 15.1, checkpointed 13.9 (of older
# code, counted on a stand-in for a GPU: results/fakegpu).
from config.vanilla_82m import *

out_dir = 'out/vanilla_468m'
n_layer, n_head, n_embd = 24, 16, 1024  # FFN 3,584

# Norms and SwiGLU are computed again in the backward pass, and 32 x 2,048 fit a GPU of 80 GB: without
# this, a step takes 68.4 GiB before DDP's buckets and NCCL's own memory.
activation_memory_budget = 0.9
