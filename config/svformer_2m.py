# SVFormer: every layer attends with the first layer's values (Eq. 10).
from config.vanilla_2m import *

out_dir = 'out/svformer_2m'
share_v = True
