//! A stepper that computes nothing and a tokenizer without a vocabulary, for tests of the loops around them.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use npuhal_core::RunError;
use npuhal_core::stage::{Control, HiddenRows, Placement, Row, SegmentCapacity, SequenceId, Stepper, TokenId, Want};
use npuhal_models::sequence::{TextStream, TokenText};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

pub const VOCAB: usize = 10;
pub const EOS: TokenId = 9;

/// Token `t` is `<t>` unless `bytes` says otherwise.
#[derive(Default)]
pub struct FakeTokenizer {
    pub bytes: BTreeMap<TokenId, Vec<u8>>,
    pub control: Vec<TokenId>,
    pub usable: Option<usize>,
}

impl FakeTokenizer {
    pub fn from_case(case: &Value) -> Self {
        let bytes = case["bytes"].as_object().into_iter().flatten();
        let list = |value: &Value| value.as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect();
        Self { bytes: bytes.map(|(id, value)| (id.parse().unwrap(), list(value))).collect(), ..Self::default() }
    }
}

impl TokenText for FakeTokenizer {
    fn is_eos(&self, id: TokenId) -> bool {
        id == EOS
    }

    fn is_control(&self, id: TokenId) -> bool {
        self.control.contains(&id)
    }

    fn token_bytes(&self, id: TokenId) -> Cow<'_, [u8]> {
        match self.bytes.get(&id) {
            Some(bytes) => Cow::Borrowed(bytes),
            None => Cow::Owned(format!("<{id}>").into_bytes()),
        }
    }

    fn stream(&self) -> Box<dyn TextStream + '_> {
        Box::new(FakeStream { tokenizer: self, held: Vec::new() })
    }

    fn usable_ids(&self) -> usize {
        self.usable.unwrap_or(usize::MAX)
    }
}

struct FakeStream<'t> {
    tokenizer: &'t FakeTokenizer,
    held: Vec<u8>,
}

impl TextStream for FakeStream<'_> {
    fn push(&mut self, id: TokenId) -> String {
        if !self.tokenizer.is_control(id) {
            self.held.extend_from_slice(&self.tokenizer.token_bytes(id));
        }
        let valid = match std::str::from_utf8(&self.held) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        String::from_utf8(self.held.drain(..valid).collect()).unwrap()
    }

    fn flush(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}

/// Which logits follow a row.
#[derive(Clone)]
pub enum Rule {
    /// 5.0 on the successor.
    Ramp,
    /// 5.0 on the entry for the token.
    Next(BTreeMap<TokenId, TokenId>),
    /// The same for all rows.
    Fixed(Vec<f32>),
    /// A hash of all ids up to the row.
    Prefix,
    /// A hash of the last two ids: what came before comes again.
    Pairs,
    /// A ramp, but not a number after this token.
    NanAt(TokenId),
}

impl Rule {
    pub fn from_case(case: &Value) -> Self {
        let id = |text: &String| text.parse::<TokenId>().unwrap();
        if let Some(next) = case["next"].as_object() {
            return Self::Next(next.iter().map(|(from, to)| (id(from), to.as_u64().unwrap() as TokenId)).collect());
        }
        let Some(fixed) = case["logits"].as_object() else { return Self::Ramp };
        let mut logits = vec![0.0; VOCAB];
        fixed.iter().for_each(|(token, logit)| logits[id(token) as usize] = logit.as_f64().unwrap() as f32);
        Self::Fixed(logits)
    }

    pub fn fill(&self, prefix: &[TokenId], logits: &mut [f32]) {
        let token = prefix[prefix.len() - 1];
        match self {
            Self::Ramp => logits[(token as usize + 1) % VOCAB] = 5.0,
            Self::Next(next) => logits[next[&token] as usize] = 5.0,
            Self::Fixed(fixed) => logits.copy_from_slice(fixed),
            Self::NanAt(at) if token == *at + 1 => logits[0] = f32::NAN,
            Self::NanAt(_) => logits[(token as usize + 1) % VOCAB] = 5.0,
            Self::Prefix | Self::Pairs => {
                let seen = if matches!(self, Self::Pairs) { &prefix[prefix.len().saturating_sub(2)..] } else { prefix };
                let mut hash = seen.iter().fold(7u64, |hash, &id| (hash ^ u64::from(id)).wrapping_mul(0x100_0000_01B3));
                for logit in logits {
                    hash = hash.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    *logit = (hash >> 40) as f32 / 4e6;
                }
            }
        }
    }
}

#[derive(Default)]
pub struct Log {
    pub rows: Vec<(Row, bool)>,
    /// What each sequence holds.
    pub held: BTreeMap<SequenceId, Vec<TokenId>>,
    pub begun: usize,
    pub ended: usize,
    /// A row at this position fails.
    pub fail_at: Option<u32>,
    /// A row of this token fails.
    pub fail_on: Option<TokenId>,
    pub fail_begin: bool,
    pub steps: usize,
}

impl Log {
    pub fn held(&self, sequence: u32) -> &[TokenId] {
        self.held.get(&SequenceId(sequence)).map_or(&[], Vec::as_slice)
    }
}

/// How often a stepper was begun and ended.
pub fn begun_and_ended(log: &Mutex<Log>) -> (usize, usize) {
    let log = log.lock().unwrap();
    (log.begun, log.ended)
}

/// Checks its rows as a real one does, and remembers them.
pub struct FakeStepper {
    pub rule: Rule,
    pub positions: u32,
    pub sequences: u32,
    pub keeps_nothing: bool,
    /// What is held is gone when a generation begins.
    pub forgets_at_begin: bool,
    pub log: Arc<Mutex<Log>>,
}

impl Default for FakeStepper {
    fn default() -> Self {
        Self {
            rule: Rule::Ramp,
            positions: 64,
            sequences: 2,
            keeps_nothing: false,
            forgets_at_begin: false,
            log: Arc::default(),
        }
    }
}

impl Stepper for FakeStepper {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn capacity(&self) -> SegmentCapacity {
        SegmentCapacity { positions: self.positions, rows_per_call: u32::MAX, sequences: self.sequences }
    }

    fn placement(&self) -> Vec<Placement> {
        Vec::new()
    }

    fn begin(&mut self) -> Result<(), RunError> {
        let mut log = self.log.lock().unwrap();
        if log.fail_begin {
            return Err(failed());
        }
        log.begun += 1;
        if self.forgets_at_begin {
            log.held.clear();
        }
        Ok(())
    }

    fn end(&mut self) {
        self.log.lock().unwrap().ended += 1;
    }

    fn step(
        &mut self,
        rows: &[Row],
        want: Want<'_>,
        logits: &mut HiddenRows,
        control: &Control,
    ) -> Result<(), RunError> {
        control.check()?;
        let mut log = self.log.lock().unwrap();
        log.steps += 1;
        assert!(!rows.is_empty());
        logits.reset(want.count(rows.len()), VOCAB);
        let mut next = 0;
        for (index, row) in rows.iter().enumerate() {
            assert!(row.sequence.0 < self.sequences && row.position < self.positions);
            let held = log.held.entry(row.sequence).or_default();
            assert_eq!(row.position as usize, held.len(), "rows continue what is held");
            held.push(row.token);
            let prefix = held.clone();
            if log.fail_at == Some(row.position) || log.fail_on == Some(row.token) {
                return Err(failed());
            }
            let wanted = want.selects(index, rows.len());
            log.rows.push((*row, wanted));
            if wanted {
                self.rule.fill(&prefix, logits.row_mut(next));
                next += 1;
            }
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        let mut log = self.log.lock().unwrap();
        let held = log.held.entry(sequence).or_default();
        held.truncate(if self.keeps_nothing { 0 } else { len });
        held.len()
    }
}

fn failed() -> RunError {
    RunError::Failed { run: None, state: "ERROR".to_owned(), detail: String::new() }
}
