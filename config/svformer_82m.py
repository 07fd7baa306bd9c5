# SVFormer: every layer attends with the first layer's values (Eq. 10).
from config.vanilla_82m import *

out_dir = 'out/svformer_82m'
share_v = True
