# Determined sources this file in every container of a task, at each start and restart, under
# `set -e` and `set -x`. The subshell keeps options and variables inside, `|| true` suspends `set -e`
# in it and keeps failures inside. The training starts anyway, and names what it lacks.
(
    { set +ux; } 2> /dev/null

    # The first line has the packages for pip to add, the others those that pip must not change.
    # Nothing is imported; a spec without an origin is only a folder of that name. The image may lack
    # three packages of the library. The example trials need the digits of scikit-learn. Only Latte
    # needs diffusers, which from 0.36 on needs the torch.accelerator of torch 2.6 and later.
    {
        read -ra missing
        mapfile -t installed
    } < <(python3 -c '
import json
from contextlib import suppress
from importlib import metadata, util
from os import environ, path

needed = {"yaml": "pyyaml", "tensorboard": "tensorboard", "rich": "rich"}
if path.isdir("trials/data"):
    needed["sklearn"] = "scikit-learn"
entrypoint = json.loads(environ.get("DET_EXPERIMENT_CONFIG", "{}")).get("entrypoint") or ""
words = entrypoint if isinstance(entrypoint, str) else " ".join(map(str, entrypoint))
words = words.split()
if "compare" in words and not {"determined_amp", "det-amp"}.isdisjoint(words):
    needed |= {name: name for name in ("optuna", "matplotlib", "scipy")}
words.append(str(json.loads(environ.get("DET_HPARAMS", "{}")).get("trial")))
if any(word.startswith("trials.latte:") for word in words):
    torch = path.dirname(getattr(util.find_spec("torch"), "origin", None) or "")
    newest = path.exists(path.join(torch, "accelerator"))
    needed["diffusers"] = "diffusers" if newest else "diffusers<0.36"
print(*(n for module, n in needed.items() if not getattr(util.find_spec(module), "origin", None)))
for name in "torch", "torchvision", "numpy", "requests", "determined":
    with suppress(metadata.PackageNotFoundError):
        print(name, metadata.version(name), sep="==")
')
    if [ -n "${missing[0]}" ]; then
        python3 -m pip install -qq --no-input --disable-pip-version-check \
            --constraint <(printf '%s\n' "${installed[@]}") "${missing[@]}" ||
            echo "startup-hook: WARNING: pip failed to add: ${missing[*]}" >&2
    fi

    echo "startup-hook: $(python3 --version) ${installed[*]}"
) || true
