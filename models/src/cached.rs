//! A stepper, and what the KV cache of each of its sequences holds.

use crate::prefix::PrefixCache;
use crate::sequence::{Sequence, Share};
use npuhal_core::RunError;
use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Stepper, TokenId, Want};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Sequences of a stepper that are made use of.
pub(crate) const MAX_SEQUENCES: u32 = 256;

/// Puts rows of sequences together, has them computed, and keeps account of the KV cache.
pub(crate) struct CachedStepper {
    stepper: Box<dyn Stepper>,
    caches: Vec<PrefixCache>,
    rows: Vec<Row>,
    wanted: Vec<bool>,
    logits: HiddenRows,
}

/// The rows of one sequence in a step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Planned {
    from: usize,
    rows: usize,
    /// Its rows of logits.
    pub(crate) logits: Range<usize>,
}

impl Planned {
    pub(crate) fn is_empty(&self) -> bool {
        self.rows == 0
    }
}

impl CachedStepper {
    pub(crate) fn new(stepper: Box<dyn Stepper>) -> Self {
        let sequences = stepper.capacity().sequences.clamp(1, MAX_SEQUENCES);
        Self {
            stepper,
            caches: vec![PrefixCache::new(); sequences as usize],
            rows: Vec::new(),
            wanted: Vec::new(),
            logits: HiddenRows::new(),
        }
    }

    pub(crate) fn stepper(&self) -> &dyn Stepper {
        self.stepper.as_ref()
    }

    /// Forgets what the KV cache holds.
    pub(crate) fn stepper_mut(&mut self) -> &mut dyn Stepper {
        self.caches.iter_mut().for_each(PrefixCache::clear);
        self.stepper.as_mut()
    }

    pub(crate) fn into_stepper(self) -> Box<dyn Stepper> {
        self.stepper
    }

    pub(crate) fn begin(&mut self) -> Result<(), RunError> {
        self.stepper.begin()
    }

    pub(crate) fn end(&mut self) {
        self.stepper.end();
    }

    pub(crate) fn sequences(&self) -> usize {
        self.caches.len()
    }

    pub(crate) fn cache(&self, id: SequenceId) -> &PrefixCache {
        &self.caches[id.0 as usize]
    }

    /// Takes over what the cache of the sequence holds of its prompt.
    pub(crate) fn resume(&mut self, sequence: &mut Sequence<'_>) {
        let reusable = self.cache(sequence.id()).reusable(&sequence.tokens()[..sequence.prompt_tokens()]);
        let wanted = sequence.resume_from(reusable);
        let kept = self.cut(sequence.id(), wanted);
        sequence.resume_from(kept);
    }

    /// Forgets positions from `len` on, here and in the stepper; returns how many remain.
    pub(crate) fn cut(&mut self, id: SequenceId, len: usize) -> usize {
        let remaining = self.stepper.truncate(id, len).min(len);
        self.caches[id.0 as usize].cut(remaining);
        remaining
    }

    /// A new step, of no rows yet.
    pub(crate) fn clear(&mut self) {
        self.rows.clear();
        self.wanted.clear();
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Adds the next rows of `sequence`: at most `limit`, of these at most `drafts` guessed ones.
    pub(crate) fn plan(&mut self, sequence: &mut Sequence<'_>, limit: usize, drafts: usize) -> Planned {
        let from = sequence.computed();
        let first = self.wanted.iter().filter(|&&wanted| wanted).count();
        let Share { rows, wanted } = sequence.push_rows(limit, drafts, &mut self.rows, &mut self.wanted);
        self.caches[sequence.id().0 as usize].cut(from);
        Planned { from, rows, logits: first..first + wanted }
    }

    /// Computes the step; returns the time it took.
    pub(crate) fn run(&mut self, control: &Control) -> Result<Duration, RunError> {
        let count = self.wanted.iter().filter(|&&wanted| wanted).count();
        let want = match self.wanted.split_last() {
            _ if count == 0 => Want::Nothing,
            Some((true, _)) if count == 1 => Want::Last,
            _ => Want::Each(&self.wanted),
        };
        let started = Instant::now();
        self.stepper.step(&self.rows, want, &mut self.logits, control)?;
        if self.logits.rows() != count {
            let reason = format!("wanted {count} rows of logits, found {}", self.logits.rows());
            return Err(RunError::BadRows { reason });
        }
        Ok(started.elapsed())
    }

    pub(crate) fn logits(&self, index: usize) -> &[f32] {
        self.logits.row(index)
    }

    /// After a step that was computed and whose logits were taken: what the cache holds now. Drafts that did not come true are
    /// forgotten.
    pub(crate) fn settle(&mut self, planned: &Planned, sequence: &mut Sequence<'_>) {
        let computed = sequence.computed();
        let tokens: &[TokenId] = &sequence.tokens()[planned.from..computed];
        self.caches[sequence.id().0 as usize].extend(planned.from, tokens.iter().copied());
        sequence.end_step(planned.rows == self.rows.len());
        if computed < planned.from + planned.rows {
            let kept = self.cut(sequence.id(), computed);
            sequence.rewind(kept);
        }
    }

    /// After a step that failed: its rows are forgotten.
    pub(crate) fn abandon(&mut self, planned: &Planned, sequence: &mut Sequence<'_>) {
        sequence.end_step(false);
        let kept = self.cut(sequence.id(), planned.from);
        sequence.rewind(kept);
    }
}
