# Multi-query attention, one KV head: an eighth of the KV cache (Fig. 10).
from config.vanilla_82m import *

out_dir = 'out/mqa_82m'
n_kv_head = 1
