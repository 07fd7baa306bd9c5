# ResFormer whose weights follow from x, for each token and channel (RWKV-7).
from config.vanilla_82m import *

out_dir = 'out/channel_gate_82m'
v_residual = True
residual_weights = 'channel'
