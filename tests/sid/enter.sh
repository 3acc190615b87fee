# enter.sh TREE REPOSITORY NODE COMMAND …: in a mount namespace of its own, make TREE the root and run a command there.
# /sys and /dev are those of the recorded NODE, as far as it has them; a plain chroot would show the machine's own.
set -e
tree=$1 repository=$2 node=$3
shift 3
mount --bind "$tree" "$tree"
cd "$tree"
mount --rbind /proc proc
mount -t tmpfs -o mode=755 none sys
mkdir -p sys/devices/system/cpu sys/fs/cgroup farm old
mount --rbind /sys/devices/system/cpu sys/devices/system/cpu
mount --rbind /sys/fs/cgroup sys/fs/cgroup
mount -t tmpfs -o mode=755 none dev
for name in null zero full random urandom tty; do
    touch dev/$name
    mount --bind /dev/$name dev/$name
done
mkdir dev/shm
mount -t tmpfs none dev/shm
ln -s /proc/self/fd dev/fd
mkdir -p opt/rocm
mount -t tmpfs none opt/rocm
for part in sys dev opt; do
    if [ -d "$node/$part" ]; then cp -r "$node/$part/." $part/; fi
done
mount -t tmpfs none run
mount -t tmpfs none tmp
for name in resolv.conf hosts; do cp /etc/$name etc/$name 2>/dev/null || true; done
mount --bind "$repository" farm
pivot_root . old
cd /farm
umount -l /old
exec "$@"
