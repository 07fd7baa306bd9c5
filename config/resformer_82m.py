# ResFormer: V_n <- (V_1 + V_n) / 2 (Eq. 7).
from config.vanilla_82m import *

out_dir = 'out/resformer_82m'
v_residual = True
