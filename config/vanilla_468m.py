# The paper's 468M Transformer (Table 4), otherwise as at 82M. A step takes 58.5 GiB of each GPU,
# with batch_size=16 32.8, with 8 20.0, checkpointed 17.5 (counted on a stand-in for a GPU:
# results/fakegpu).
from config.vanilla_82m import *

out_dir = 'out/vanilla_468m'
n_layer, n_head, n_embd = 24, 16, 1024  # FFN 3,584

# Norms and SwiGLU are computed again in the backward pass, and 32 x 2,048 fit a GPU of 80 GB: without
# this, a step takes 77.9 GiB before DDP's buckets and NCCL's own memory.
activation_memory_budget = 0.9
