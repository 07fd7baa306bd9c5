# The paper's 180M Transformer (Table 4), otherwise as at 82M. A step takes 27.1 GiB of a GPU, 28.0
# of each of eight, with batch_size=16 14.6, checkpointed 7.1 (counted on a stand-in for a GPU:
# results/fakegpu).
from config.vanilla_82m import *

out_dir = 'out/vanilla_180m'
n_layer, n_head, n_embd = 12, 12, 768  # FFN 2,688
