/* The plain C interface of the CPU kernel: pointers and sizes, nothing of torch. leantune/kernels/native.py mirrors it. */
#pragma once
#include <stdint.h>

#define LEANTUNE_INTERFACE 6

enum { LEANTUNE_FLOAT32 = 0, LEANTUNE_BFLOAT16 = 1 };

/* One parameter in one step: a (rows, cols) matrix and its state, as leantune/codec/ternary_state.py lays it out. */
typedef struct {
    int64_t rows, cols, first_row; /* first_row: global index of row 0, part of the key of random bits */
    int64_t grad_row, grad_column; /* elements between neighbours of a column and of a row of the gradient */
    int64_t blocks_per_row, bytes_per_row;
    uint64_t key;
    int32_t block, planes, rank; /* block: a multiple of 16; planes of momentum: 1 or 2; rank 0: no carry */
    int32_t grad_dtype, weight_dtype, stochastic, threads;
    float lr, decay;             /* w <- w * decay - lr * step */
    float beta1, rest1, release; /* rest1 = 1 - beta1, release = beta1 / (1 - beta1) */
    float beta2, rest2, bias;    /* bias = 1 / (1 - beta2^t) */
    float eps, grad_scale;
    int32_t refresh; /* whether V is worked out anew; without it V stays, and Y is not summed */
    int32_t sampled; /* whether v and c are stored anew; without it they stay, but for blocks that hold nothing yet */
    const void *grad;
    void *weight;
    int8_t *remainder; /* of master_bits = 24, or null */
    uint8_t *momentum_trits[2];
    uint16_t *momentum_scale[2];
    uint8_t *variance_trits;
    uint16_t *variance_level, *variance_step;
    uint16_t *carry_rows;    /* bf16 (rows, rank): read, then written; null without a carry */
    uint16_t *carry_columns; /* V that u decodes with, bf16 (cols, rank) */
    uint16_t *carry_basis;   /* V for the next step */
    const uint16_t *basis;   /* V of this step; dead columns are left out of it */
    float *column_means;     /* c that v decodes with, fp32 (cols) */
    const float *new_column_means; /* c that v is coded relative to; leantune_update works it out */
    float *exact_momentum, *exact_variance; /* fp32 (rows, cols), or null where the state is ternary */
} LeantuneTernary;

#ifdef __cplusplus
extern "C" {
#endif

/* The interface this library was built with, and the instruction set it runs with here. */
int leantune_interface(void);
const char *leantune_instructions(void);
/* Limit the instruction set ("avx512", "avx2", "portable"); returns 0, or 1 where this machine lacks it. */
int leantune_use(const char *instructions);

/* One step of `count` parameters whose rows are all here: everything, the state that belongs to the columns too. The bits
   do not depend on the threads (those of the first parameter), nor on what is updated together. Where the states are exact, `block` elements share a key of random bits, and no field that
   describes a ternary state is read. */
void leantune_update(const LeantuneTernary *const *parameters, int64_t count);
/* The parts of the step of a ternary parameter whose other rows are elsewhere. Sums of squares of the scaled gradient over
   the rows, fp64 (cols). Rows fall into equal ranges, so sums do not depend on the threads. */
void leantune_ternary_squares(const LeantuneTernary *t, double *columns);
/* Decode, rule, encode, move the weights; with a carry and `refresh` also `products`: Y = u^T u V, fp32 (rank, cols). What
   belongs to the columns (column_means, carry_columns, carry_basis) is read. */
void leantune_ternary_step(const LeantuneTernary *t, float *products);
/* V for the next step, bf16 (cols, rank): Y + shift V orthonormalised; `products`: Y, fp32 (rank, cols). */
void leantune_next_basis(const float *products, const uint16_t *basis, int64_t cols, int rank, uint16_t *out);
/* fp32 `values` (rows, cols) become weights from row `top` and column `left` (a multiple of `block`) on, rounded
   stochastically; of `t`, cols, first_row, key, block, threads, weight (bf16) and remainder are read. */
void leantune_store(const LeantuneTernary *t, const float *values, int64_t top, int64_t rows, int64_t left, int64_t cols);
/* For each of `count` arrays the sum of its squares: NaN or Inf where an element is, or where it overflows a float. */
void leantune_sums_of_squares(const void *const *arrays, const int32_t *dtypes, const int64_t *sizes, int64_t count,
                              int threads, float *sums);

#ifdef __cplusplus
}
#endif
