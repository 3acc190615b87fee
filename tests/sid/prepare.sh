# prepare.sh: run in the tree. Build the stand-in, and put right what Debian's MIOpen asks of its compiler.
set -e
cd /usr/local/lib/farm-sid
gcc -shared -fPIC -w -D__HIP_PLATFORM_AMD__=1 hip_standin.c hip_launches.c -o libhip_standin.so
# MIOpen passes `-isystem /usr/include`, which puts C headers before those of C++. The recorded ROCM_PATH has no libraries of devices.
cat > /usr/local/lib/farm-sid/clang++ <<'W'
#!/bin/sh
unset LD_PRELOAD ROCM_PATH
for word; do
    shift
    if [ "$kept" ]; then
        kept=
        [ "$word" = /usr/include ] && continue
        set -- "$@" -isystem
    elif [ "$word" = -isystem ]; then
        kept=1
        continue
    fi
    set -- "$@" "$word"
done
exec /usr/lib/llvm-21/bin/clang++ "$@"
W
printf '#!/bin/sh\nunset LD_PRELOAD ROCM_PATH\nexec /usr/lib/llvm-21/bin/clang "$@"\n' >clang
chmod +x clang clang++
ln -sf /usr/local/lib/farm-sid/clang++ /usr/bin/clang++-21
# Its compiler of OpenCL is named by a path of the machine that built it.
library=$(ls /usr/lib/*/libMIOpen.so.1)
for path in $(grep -aoE '/build/[A-Za-z0-9_.+/-]*/clang-21' "$library" | sort -u); do
    mkdir -p "$(dirname "$path")"
    ln -sf /usr/local/lib/farm-sid/clang "$path"
done
# The farm's entry points.
/opt/venv/bin/pip --isolated install -q --no-index --no-deps --no-build-isolation -e /farm
