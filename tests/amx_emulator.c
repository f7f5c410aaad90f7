/* AMX's tile instructions, for processors without them: each is an invalid opcode there, whose signal
 * is taken, the instruction performed on tiles kept per thread, and stepped over. Exact, and slow. What
 * a processor would refuse ends the program. Encodings and rules: Intel's Software Developer's Manual,
 * volume 2. */
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { TILES = 8, ROWS = 16, BYTES = 64 };
enum { NONE, P66, PF3, PF2 }; /* the prefix that a VEX encoding stands for */

typedef struct {
    int rows, bytes;
    uint8_t at[ROWS][BYTES];
} tile;

static __thread tile tiles[TILES];
static __thread int configured;
static volatile long performed;
static struct sigaction before;

long amx_emulator_performed(void) { return performed; }

static void refuse(const char *why) {
    fprintf(stderr, "AMX emulator: %s\n", why);
    abort();
}

static tile *get(int number) {
    if (!configured) refuse("no tiles are configured");
    if (number >= TILES || !tiles[number].rows) refuse("a tile has no shape");
    return &tiles[number];
}

static void configure(const uint8_t *memory) {
    memset(tiles, 0, sizeof tiles);
    configured = memory[0] != 0;
    if (!configured) return;
    if (memory[0] != 1 || memory[1]) refuse("palette or first row");
    for (int i = 0; i < BYTES; i++) {
        int given = i < 2 || (i >= 16 && i < 16 + 2 * TILES) || (i >= 48 && i < 48 + TILES);
        if (!given && memory[i]) refuse("reserved bytes of a configuration are not 0");
    }
    for (int i = 0; i < TILES; i++) {
        tiles[i].bytes = memory[16 + 2 * i] | memory[17 + 2 * i] << 8;
        tiles[i].rows = memory[48 + i];
        if (tiles[i].rows > ROWS || tiles[i].bytes > BYTES) refuse("a tile is too large");
        if (!tiles[i].rows != !tiles[i].bytes) refuse("a tile has rows or columns alone");
    }
}

static int32_t number(uint8_t byte, int is_signed) { return is_signed ? (int8_t)byte : byte; }

static void dot(tile *total, const tile *data, const tile *weight, int prefix) {
    if (total == data || total == weight || data == weight) refuse("tiles of a product are the same");
    if (total->rows != data->rows || total->bytes != weight->bytes || data->bytes != 4 * weight->rows ||
        data->bytes % 4 || weight->bytes % 4)
        refuse("shapes of a product do not match");
    int data_signed = prefix == PF2 || prefix == PF3, weight_signed = prefix == PF2 || prefix == P66;
    for (int m = 0; m < total->rows; m++)
        for (int n = 0; n < total->bytes / 4; n++) {
            uint32_t sum;
            memcpy(&sum, &total->at[m][4 * n], 4);
            for (int k = 0; k < data->bytes; k++)
                sum += (uint32_t)(number(data->at[m][k], data_signed) *
                                  number(weight->at[k / 4][4 * n + k % 4], weight_signed));
            memcpy(&total->at[m][4 * n], &sum, 4);
        }
}

/* Denormal operands and results are zeros. */
static float flushed(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0, value) : value; }

static float half(const uint8_t *bytes) {
    uint32_t bits = (uint32_t)(bytes[0] | bytes[1] << 8) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return flushed(value);
}

/* Products of even and of odd numbers are summed apart, then added to each other and to the tile. */
static void dot_halves(tile *total, const tile *data, const tile *weight) {
    if (total == data || total == weight || data == weight) refuse("tiles of a product are the same");
    if (total->rows != data->rows || total->bytes != weight->bytes || data->bytes != 4 * weight->rows ||
        data->bytes % 4 || weight->bytes % 4)
        refuse("shapes of a product do not match");
    for (int m = 0; m < total->rows; m++)
        for (int n = 0; n < total->bytes / 4; n++) {
            float sums[2] = {0, 0}, sum;
            for (int k = 0; k < data->bytes / 2; k++) {
                float product = half(data->at[m] + 2 * k) * half(weight->at[k / 2] + 4 * n + 2 * (k % 2));
                sums[k % 2] = flushed(sums[k % 2] + product);
            }
            memcpy(&sum, &total->at[m][4 * n], 4);
            sum = flushed(flushed(sum) + flushed(sums[0] + sums[1]));
            memcpy(&total->at[m][4 * n], &sum, 4);
        }
}

static const int REGISTERS[16] = {
    REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
    REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
};

/* Performs the instruction at `code`; returns its length, or 0 if it is none of AMX. */
static int perform(const uint8_t *code, const greg_t *registers) {
    if (code[0] != 0xC4 || (code[1] & 0x1F) != 2 || code[2] & 0x84) return 0;
    int prefix = code[2] & 3, third = ~code[2] >> 3 & 15, opcode = code[3];
    int mode = code[4] >> 6, reg = (code[4] >> 3 & 7) | (~code[1] >> 4 & 8), rm = code[4] & 7;
    if (mode == 3) {
        if (opcode == 0x5E)
            dot(get(reg), get(rm | (~code[1] >> 2 & 8)), get(third), prefix);
        else if (opcode == 0x5C && prefix == PF3)
            dot_halves(get(reg), get(rm | (~code[1] >> 2 & 8)), get(third));
        else if (opcode == 0x49 && prefix == PF2 && !rm && !third)
            memset(get(reg)->at, 0, sizeof tiles[0].at);
        else if (opcode == 0x49 && prefix == NONE && code[4] == 0xC0 && !third)
            configured = 0;
        else
            return 0;
        return 5;
    }
    int configures = opcode == 0x49 && prefix == NONE && !reg;
    int stores = prefix == PF3, loads = prefix == PF2 || prefix == P66;
    if (third || (!configures && (opcode != 0x4B || rm != 4 || (!stores && !loads)))) return 0;

    int length = 5, base = rm, has_base = 1, small;
    uint64_t stride = 0, address = 0;
    if (rm == 4) {
        int sib = code[length++], index = (sib >> 3 & 7) | (~code[1] >> 3 & 8);
        base = sib & 7;
        has_base = mode || base != 5;
        if (index != 4) stride = (uint64_t)registers[REGISTERS[index]] << (sib >> 6);
    }
    if (mode == 1) {
        address = (uint64_t)(int8_t)code[length++];
    } else if (mode == 2 || (mode == 0 && base == 5)) {
        memcpy(&small, code + length, 4);
        address = (uint64_t)(int64_t)small;
        length += 4;
        if (mode == 0 && rm == 5) {
            has_base = 0;
            address += (uint64_t)(uintptr_t)(code + length);
        }
    }
    if (has_base) address += (uint64_t)registers[REGISTERS[base | (~code[1] >> 2 & 8)]];
    if (configures) {
        configure((const uint8_t *)(uintptr_t)(address + stride));
        return length;
    }
    tile *one = get(reg);
    if (loads) memset(one->at, 0, sizeof one->at);
    for (int row = 0; row < one->rows; row++) {
        uint8_t *memory = (uint8_t *)(uintptr_t)(address + (uint64_t)row * stride);
        memcpy(stores ? memory : one->at[row], stores ? one->at[row] : memory, (size_t)one->bytes);
    }
    return length;
}

static void take(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    int length = perform((const uint8_t *)(uintptr_t)registers[REG_RIP], registers);
    registers[REG_RIP] += length;
    __atomic_add_fetch(&performed, length != 0, __ATOMIC_RELAXED);
    if (!length) sigaction(SIGILL, &before, NULL); /* it comes again, for whom it is */
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {.sa_sigaction = take, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, &before);
}
