// Raw memory, atomics and the two system calls a thread pool needs. Addresses are int64.
#pragma once

#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define INLINE static inline __attribute__((always_inline))
// What the loader looks up by name; everything else stays inside the library.
#define EXPORTED __attribute__((visibility("default")))

#define ACCESSORS(name, type)                                        \
    INLINE type load_##name(int64_t address)                         \
    {                                                                \
        type value;                                                  \
        memcpy(&value, (const void *)address, sizeof value);         \
        return value;                                                \
    }                                                                \
    INLINE void store_##name(int64_t address, type value)            \
    {                                                                \
        memcpy((void *)address, &value, sizeof value);               \
    }

ACCESSORS(i64, int64_t)
ACCESSORS(u32, uint32_t)
ACCESSORS(u16, uint16_t)
ACCESSORS(f32, float)

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE float bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Returns the value before.
INLINE int64_t atomic_add(int64_t address, int64_t value)
{
    return __atomic_fetch_add((int64_t *)address, value, __ATOMIC_SEQ_CST);
}

INLINE int64_t atomic_load(int64_t address)
{
    return __atomic_load_n((int64_t *)address, __ATOMIC_SEQ_CST);
}

INLINE void atomic_store(int64_t address, int64_t value)
{
    __atomic_store_n((int64_t *)address, value, __ATOMIC_SEQ_CST);
}

// Stores `value` if `expected` stands there; returns what stood there.
INLINE int64_t compare_exchange(int64_t address, int64_t expected, int64_t value)
{
    __atomic_compare_exchange_n(
        (int64_t *)address, &expected, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}

enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };

// futex(2) on the low 32 bits of the int64 at `address`; a value above 32 bits is cut.
INLINE void futex(int64_t address, int64_t operation, int64_t value)
{
    syscall(SYS_futex, address, operation, (uint32_t)value, 0, 0, 0);
}
