# ResFormer: V_n <- (V_1 + V_n) / 2 (Eq. 7).
from config.vanilla_2m import *

out_dir = 'out/resformer_2m'
v_residual = True
