//! One page of attention without special instructions.
#![allow(unsafe_code, reason = "jobs carry raw pointers to parts of larger buffers")]

use super::{ChunkJob, soften};
use crate::kv::{KEY_BLOCK, PAGE_POSITIONS, PLANE};
use npuhal_core::dtype::f16_value;

/// # Safety
/// The job's pointers cover what their documentation says.
pub(crate) unsafe fn chunk(job: &ChunkJob) {
    let dim = job.shape.head_dim;
    let padded = job.shape.padded_dim();
    // SAFETY: the caller's promise.
    let (keys, values, q, scores, acc) = unsafe {
        (
            std::slice::from_raw_parts(job.keys, PAGE_POSITIONS * dim),
            std::slice::from_raw_parts(job.values, PAGE_POSITIONS * padded),
            std::slice::from_raw_parts(job.q, job.heads * dim),
            std::slice::from_raw_parts_mut(job.scores, job.heads * PAGE_POSITIONS),
            std::slice::from_raw_parts_mut(job.acc, job.heads * padded),
        )
    };
    scores.fill(0.0);
    for block in 0..job.len.div_ceil(KEY_BLOCK) {
        for d in 0..dim {
            let at = (block * dim + d) * KEY_BLOCK;
            let mut row = [0.0; KEY_BLOCK];
            for (key, bits) in row.iter_mut().zip(&keys[at..at + KEY_BLOCK]) {
                *key = f16_value(*bits);
            }
            for head in 0..job.heads {
                let query = q[head * dim + d];
                let at = head * PAGE_POSITIONS + block * KEY_BLOCK;
                for (score, key) in scores[at..at + KEY_BLOCK].iter_mut().zip(row) {
                    *score += key * query;
                }
            }
        }
    }
    for head in 0..job.heads {
        let (max, sum) = soften(&mut scores[head * PAGE_POSITIONS..head * PAGE_POSITIONS + job.len], job.first);
        // SAFETY: one maximum and one sum a head.
        unsafe {
            *job.max.add(head) = max;
            *job.sum.add(head) = sum;
        }
    }
    acc.fill(0.0);
    for plane in 0..job.shape.planes() {
        for position in 0..job.len {
            let at = (plane * PAGE_POSITIONS + position) * PLANE;
            let mut row = [0.0; PLANE];
            for (value, bits) in row.iter_mut().zip(&values[at..at + PLANE]) {
                *value = f16_value(*bits);
            }
            for head in 0..job.heads {
                let weight = scores[head * PAGE_POSITIONS + position];
                let at = head * padded + plane * PLANE;
                for (acc, value) in acc[at..at + PLANE].iter_mut().zip(row) {
                    *acc += value * weight;
                }
            }
        }
    }
}
