#!/usr/bin/env bash
# Both commands of README.md where nothing was installed by hand: a minimal Debian tree with what the
# README asks for, a clone of HEAD, and a user without root.
#
#     tests/fresh.sh [WORD...]       words are given to `python -m tests`: a part of the tests, --all
#     KEEP=DIR tests/fresh.sh        keeps the tree there, and goes on from it the next time
#     ONLY=tests tests/fresh.sh      one of the two commands: demo, tests
#     SUITE=trixie tests/fresh.sh    another Debian
#     INSTALL="libibverbs1 ..."      packages that are installed beside
#
# Needs root, debootstrap and 6 GB. The host lends its way to packages: its Debian mirror, its
# configuration of pip with the directories that this names, its certificates and its proxies.
set -euo pipefail
cd "$(dirname "$0")/.."

SUITE=${SUITE:-bookworm}
MINIMUM="python3 python3-venv gcc libc6-dev ca-certificates" # "Python 3.11 or newer and a C compiler"

[ "$(id -u)" = 0 ] || { echo "tests/fresh.sh: run it as root, for chroot" >&2; exit 2; }
command -v debootstrap >/dev/null || { echo "tests/fresh.sh: apt-get install debootstrap" >&2; exit 2; }

if [ -z "${FRESH_UNSHARED:-}" ]; then # mounts of our own, which end with this script
  exec env FRESH_UNSHARED=1 unshare --mount --pid --fork --kill-child "$PWD/tests/fresh.sh" "$@"
fi

if [ -n "${KEEP:-}" ]; then
  mkdir -p "$KEEP"
  tree=$(cd "$KEEP" && pwd)
else
  tree=$(mktemp -d)
  trap 'umount -R "$tree"/{proc,dev} 2>/dev/null || true; rm -rf --one-file-system "$tree"' EXIT
fi

mirror() { # the first address of the host's own Debian packages
  { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | sed -n 's/^deb \(\[.*\] \)\?//p'
    sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/*.sources 2>/dev/null
  } | tr ' ' '\n' | grep -E '/debian/?$' | head -n 1 || true
}

inside() { chroot "$tree" /usr/bin/env -i "${environment[@]}" PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }

# ---- the tree

if [ ! -e "$tree/etc/debian_version" ]; then
  # shellcheck disable=SC2046 # without a mirror debootstrap knows one
  debootstrap --variant=minbase --include="${MINIMUM// /,}" "$SUITE" "$tree" $(mirror)
fi
mount -t proc proc "$tree/proc"
mount -t tmpfs -o mode=755 tmpfs "$tree/dev"
mkdir -p "$tree/dev/shm" "$tree/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$tree/dev/shm"
for node in null zero full random urandom; do
  touch "$tree/dev/$node" && mount --bind "/dev/$node" "$tree/dev/$node"
done
ln -sfn /proc/self/fd "$tree/dev/fd"

# ---- the host's way to packages

cp -L /etc/resolv.conf "$tree/etc/resolv.conf"
cp -rLT /etc/ssl/certs "$tree/etc/ssl/certs" 2>/dev/null || true # links that lead nowhere
for place in /etc/pip.conf /etc/xdg/pip; do
  [ ! -e "$place" ] || { mkdir -p "$tree$(dirname "$place")" && cp -rT "$place" "$tree$place"; }
done
python3 -m pip config list 2>/dev/null | grep -oE "(file://)?/[^' ]+" | sed 's,^file://,,' |
  while read -r place; do # directories of packages; an index `simple` lies beside its files
    [ "$(basename "$place")" != simple ] || place=$(dirname "$place")
    [ ! -d "$place" ] || { mkdir -p "$tree$place" && mount --bind "$place" "$tree$place"; }
  done
environment=(LANG=C.UTF-8)
while IFS= read -r -d '' pair; do
  case ${pair%%=*} in
    PIP_* | *_proxy | *_PROXY | SSL_CERT_* | REQUESTS_CA_BUNDLE | CURL_CA_BUNDLE) environment+=("$pair") ;;
  esac
done < <(env -0)

if [ -n "${INSTALL:-}" ]; then
  # shellcheck disable=SC2086 # several packages
  inside DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $INSTALL
fi

# ---- somebody without root

id=10001
if ! grep -q '^fresh:' "$tree/etc/passwd"; then
  inside useradd --uid $id --create-home --shell /bin/bash fresh
fi
own=${XDG_CONFIG_HOME:-~/.config}/pip/pip.conf
[ ! -e "$own" ] || install -D -m 644 "$own" "$tree/home/fresh/.config/pip/pip.conf"
clone=/home/fresh/flowkv
if [ -e "$tree$clone" ]; then
  git="git -c safe.directory=$tree$clone -C $tree$clone"
  $git fetch -q "$PWD" HEAD && $git reset -q --hard FETCH_HEAD
else
  git clone -q --no-hardlinks . "$tree$clone"
fi
chown -R $id:$id "$tree$clone"

readme_command() { # the fenced block behind <!-- $1 -->
  awk -v marker="<!-- $1 -->" '$0 == marker {seen = 1; next}
       seen && /^```/ {if (inside) exit; inside = 1; next}
       inside' README.md
}

fresh() { # fresh NAME COMMAND: as that user, in the clone
  local status=0 start=$SECONDS
  printf '\n--- %s\n%s\n' "$1" "$2"
  chroot --userspec=$id:$id "$tree" /usr/bin/env -i "${environment[@]}" \
    PATH=/usr/bin:/bin HOME=/home/fresh USER=fresh \
    /bin/bash -c "cd $clone && $2" || status=$?
  printf -- '--- %s: exit %d after %d s\n' "$1" "$status" $((SECONDS - start))
  return "$status"
}

failed=0
if [ "${ONLY:-demo}" = demo ]; then
  fresh "demo" "$(readme_command demo-command)" || failed=1
fi
if [ "${ONLY:-tests}" = tests ]; then
  fresh "tests" "$(readme_command test-command) $*" || failed=1
fi
exit "$failed"
