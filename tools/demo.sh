#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds into build/ and shows what kvleaf does: the worked figures of the seed documents with
# a picture of the block pool, then a language model that answers three prompts at once, and what its requests share.
# Exit code 0 where everything came out right, 1 where not or where something could not be done. Safe to run again.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=tools/setup.sh
source tools/setup.sh

usage() {
    cat <<'END'
tools/demo.sh [--device SUBSTRING] [--no-model]

  --device SUBSTRING   of an OpenCL platform or device name; default: the best there is (kvleaf-info lists them)
  --no-model           the tour only
  --help               this text
END
}

device=() model=1
while [ $# -gt 0 ]; do
    case $1 in
    --device)
        [ $# -gt 1 ] || { say '--device needs a name' && usage >&2 && exit 2; }
        device=(--device "$2")
        shift
        ;;
    --no-model) model=0 ;;
    --help | -h) usage && exit 0 ;;
    *) say "unknown argument: $1" && usage >&2 && exit 2 ;;
    esac
    shift
done

readonly model_folder=models/SmolLM2-135M-Instruct

install_packages "${build_packages[@]}"
say "building into $build/"
if [ -f $build/build.ninja ]; then
    build_folder $build
else
    build_folder $build -Dwarning_level=3
fi

$build/tools/kvleaf-tour --svg $build/tour.svg ${device[@]+"${device[@]}"} || exit 1

if [ $model -eq 1 ]; then
    make_venv tools/requirements.txt
    .venv/bin/python tools/get_model.py || exit 1
    printf '\nNow a real model, %s, answers three prompts of different lengths at once.\n\n' "${model_folder#*/}"
    .venv/bin/python tools/generate.py --model $model_folder --max-new-tokens 96 ${device[@]+"${device[@]}"} \
        --prompt 'What is the capital of France?' \
        --prompt 'Explain in two sentences why the sky is blue.' \
        --prompt 'A library keeps its books in numbered shelves. A new book goes to any free shelf, and a card in the
catalogue says on which shelves a series stands, in order. When a series ends, its shelves are free again at once. What
would go wrong if every series had to reserve one long row of shelves in advance?' || exit 1
    printf '\nWhat requests have in common is computed and stored once.\n'
    .venv/bin/python tools/sharing.py --svg $build/sharing.svg --model $model_folder \
        ${device[@]+"${device[@]}"} || exit 1
fi
