# Determined runs this in every container before the training, under `set -e` and `set -x`.
python3 -m pip install --quiet --no-deps --no-index ./determined_amp-*.whl
python3 -c 'import yaml, tensorboard, rich' 2> /dev/null || python3 -m pip install --quiet pyyaml tensorboard rich
