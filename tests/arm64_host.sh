#!/usr/bin/env bash
# Run a command in an emulated Debian for 64-bit Arm, in a copy of the committed repository:
#
#     tests/arm64_host.sh FOLDER make demo
#
# FOLDER is made if it does not exist: 450 MB for Debian, 2 GB with what `make install` brings. Needs root,
# Linux 6.7 or newer, and the packages mmdebstrap and qemu-user-static. An emulator for other programs
# than this one is not registered. The processor is a Cortex-A76, or what QEMU_CPU says; /proc/cpuinfo and
# /sys say so too, for ONNX Runtime crashes if it finds the table of another architecture there.
# APT_SOURCES is a file with Debian's mirrors; variables that begin with PIP_ are passed on.
set -euo pipefail
(($# > 1)) || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
repository="$(cd "$(dirname "$0")/.." && pwd)"
root="$(realpath -m "$1")"
shift
packages=bash,ca-certificates,coreutils,dash,findutils,gcc,grep,gzip,hostname,libc6-dev,make,mawk
packages+=,python3,python3-venv,sed,tar,base-files,base-passwd

if [ ! -d "$root" ]; then
    mmdebstrap --mode=root --variant=extract --arch=arm64 --include="$packages" bookworm "$root" \
        ${APT_SOURCES:+"$APT_SOURCES"}
    ln -s gcc "$root/usr/bin/cc"
    ln -s mawk "$root/usr/bin/awk"
    for core in 0 1; do
        printf 'processor\t: %s\nFeatures\t: fp asimd aes pmull sha1 sha2 crc32 atomics asimddp\n' "$core"
        printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: 0xd0b\n'
        printf 'CPU revision\t: 1\n\n'
    done >"$root/cpuinfo"
fi
# Not again for the same commit: another command may be running there.
commit="$(git -C "$repository" rev-parse HEAD)"
if [ "$commit" != "$(cat "$root/commit" 2>/dev/null)" ]; then
    mkdir -p "$root/bnncc"
    git -C "$repository" archive "$commit" | tar -x -C "$root/bnncc"
    echo "$commit" >"$root/commit"
fi

mapfile -t pip < <(env | grep '^PIP_' || true)
# The emulator is registered for this namespace alone, and ends with it.
exec unshare --map-root-user --mount --pid --fork bash -c '
    root=$0
    mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
    magic="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
    printf ":arm64:M::%s:%s:/usr/bin/qemu-aarch64-static:F" "$magic" "$mask" \
        >/proc/sys/fs/binfmt_misc/register
    mount --rbind /dev "$root/dev"
    mount -t proc proc "$root/proc"
    mount --bind "$root/cpuinfo" "$root/proc/cpuinfo"
    mount --rbind /sys "$root/sys"
    mount -t tmpfs none "$root/sys/devices/system/cpu"
    mkdir "$root"/sys/devices/system/cpu/cpu{0,1}
    for list in online possible present; do echo 0-1 >"$root/sys/devices/system/cpu/$list"; done
    exec chroot "$root" /usr/bin/env -i --chdir=/bnncc PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        HOME=/tmp LANG=C.UTF-8 QEMU_CPU='"${QEMU_CPU:-cortex-a76}"' "$@"
' "$root" "${pip[@]}" "$@"
