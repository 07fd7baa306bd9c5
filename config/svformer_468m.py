# SVFormer: every layer attends with the first layer's values (Eq. 10).
from config.vanilla_468m import *

out_dir = 'out/svformer_468m'
share_v = True
