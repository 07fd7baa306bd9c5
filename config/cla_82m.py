# Cross-layer attention: each pair of layers shares the keys and values of its first. Half the KV
# cache.
from config.vanilla_82m import *

out_dir = 'out/cla_82m'
share_k = share_v = 2
