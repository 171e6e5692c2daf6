# Cross-compile the native tests for AArch64, to run under QEMU: cmake -DCMAKE_TOOLCHAIN_FILE=tests/native/aarch64.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
