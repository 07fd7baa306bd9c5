# SVFormer: every layer attends with the first layer's values (Eq. 10).
from config.vanilla_180m import *

out_dir = 'out/svformer_180m'
share_v = True
