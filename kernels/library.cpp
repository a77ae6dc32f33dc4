// What the loader asks first: which sources this library was built from, and what this machine can run.

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* shoal_source_hash() { return SHOAL_SOURCE_HASH; }

// The instruction sets of this build that this machine has, best first.
EXPORT const char* shoal_instruction_sets() {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return "avx512 avx2 portable";
    if (avx2) return "avx2 portable";
#endif
    return "portable";
}
