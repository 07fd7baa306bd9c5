# The upper half of the layers attends with the middle layer's keys and the first one's values: half of
# vanilla's KV cache (FusedKV-Lite, arXiv:2512.03870).
from config.vanilla_82m import *

out_dir = 'out/fused_kv_82m'
share_k = (0, 1, 2, 3, 3, 3, 3, 3)
share_v = (0, 1, 2, 3, 0, 0, 0, 0)
