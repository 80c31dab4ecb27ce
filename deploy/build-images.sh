#!/bin/sh
# Builds the images hydra-engine ("cpu") and hydra-engine:cuda ("cuda"): `make images`.
set -eu
cd "$(dirname "$0")/.."

tool=
for name in podman buildah docker; do
  if "$name" info >/dev/null 2>&1; then # docker is a client, which builds nothing without its daemon
    tool=$name
    break
  fi
done
if [ -z "$tool" ]; then
  problem="none of them is installed"
  for name in podman buildah docker; do
    if command -v "$name" >/dev/null; then problem="$name is installed, but \`$name info\` fails (is its daemon running?)"; fi
  done
  echo "hydra-engine: images need podman, buildah or docker: $problem" >&2
  exit 1
fi

for kind in "$@"; do
  case $kind in
    cpu) file=deploy/Dockerfile image=hydra-engine ;;
    cuda) file=deploy/Dockerfile.cuda image=hydra-engine:cuda ;;
    *) echo "hydra-engine: IMAGES: expected cpu or cuda, got '$kind'" >&2; exit 2 ;;
  esac
  if ! "$tool" build -f "$file" -t "$image" .; then
    echo "hydra-engine: $image was not built; a base image, packages of the distribution and torch come from a network" >&2
    exit 1
  fi
done
