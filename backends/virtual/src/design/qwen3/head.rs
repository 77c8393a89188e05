//! Final norm and output head.

use super::groups::{GROUP_ROWS, Groups};
use super::math::{narrow, rms_norm, rounded, widen};
use super::{Dimensions, ports};
use crate::array::program::{Step, Streams};

/// Bytes of logits that leave at once.
const PORTION_BYTES: usize = 16 << 10;

/// The head's state between two steps.
#[derive(Debug)]
pub(super) struct Head {
    dimensions: Dimensions,
    phase: Phase,
    act: Option<Vec<f32>>,
    norm: Option<Vec<f32>>,
    results: Vec<f32>,
}

#[derive(Debug)]
enum Phase {
    Inputs,
    Matrix(Groups),
    /// Logits in bf16, and how many bytes of them have left.
    Logits(Vec<u8>, usize),
}

impl Head {
    pub(super) fn new(dimensions: Dimensions) -> Self {
        Self { dimensions, phase: Phase::Inputs, act: None, norm: None, results: Vec::new() }
    }

    pub(super) fn unfinished(&self) -> Option<String> {
        match &self.phase {
            Phase::Inputs if self.act.is_none() && self.norm.is_none() => None,
            Phase::Inputs => Some("head: waits for residual stream and norm".to_owned()),
            Phase::Matrix(groups) => Some(format!("head: {}", groups.progress())),
            Phase::Logits(bytes, done) => Some(format!("head: {done} of {} bytes of logits written", bytes.len())),
        }
    }

    pub(super) fn step(&mut self, streams: &mut Streams<'_>) -> Step {
        let moved = match &mut self.phase {
            Phase::Inputs => self.take_input(streams),
            Phase::Matrix(groups) => groups.step(streams, |group| group * GROUP_ROWS, &mut self.results),
            Phase::Logits(bytes, done) => {
                let end = bytes.len().min(*done + PORTION_BYTES);
                let has_left = streams.write(ports::RESULT, &bytes[*done..end]);
                *done = if has_left { end } else { *done };
                has_left
            }
        };
        if !moved {
            return Step::Waiting;
        }
        self.advance();
        Step::Progress
    }

    fn take_input(&mut self, streams: &mut Streams<'_>) -> bool {
        for (input, values) in [(ports::ACTIVATIONS, &mut self.act), (ports::NORMS, &mut self.norm)] {
            let mut bytes = vec![0; 2 * self.dimensions.hidden];
            if values.is_none() && streams.read(input, &mut bytes) {
                *values = Some(widen(&bytes));
                return true;
            }
        }
        false
    }

    fn advance(&mut self) {
        match &self.phase {
            Phase::Inputs => {
                let (Some(act), Some(norm)) = (&self.act, &self.norm) else { return };
                let normed = rms_norm(act, norm, self.dimensions.norm_epsilon);
                let operand = normed.into_iter().map(rounded).collect();
                self.results.clear();
                self.results.resize(self.dimensions.vocab, 0.0);
                self.phase = Phase::Matrix(Groups::new(self.dimensions.vocab, operand));
            }
            Phase::Matrix(groups) if groups.is_done() => self.phase = Phase::Logits(narrow(&self.results), 0),
            Phase::Logits(bytes, done) if *done == bytes.len() => *self = Self::new(self.dimensions),
            _ => {}
        }
    }
}
