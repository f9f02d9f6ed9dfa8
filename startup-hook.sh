# Determined sources this file in every container of a task, at each start and restart, under
# `set -e` and `set -x`. The subshell keeps options and variables out of Determined's shell. `|| true`
# suspends `set -e`, so after a failure the training starts anyway, and names what it lacks.
(
    { set +ux; } 2> /dev/null

    # Python prints the packages that pip must add, then one line for each that pip must not change.
    # It imports none of them. A spec without an origin is only a folder of that name. The library
    # needs the first three, the example trials scikit-learn, and `compare` the next three. Only Latte
    # needs diffusers, and diffusers 0.36 needs torch.accelerator, which torch has since 2.6.
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
