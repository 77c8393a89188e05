//! Instruction ELF files for any context length, from those for 1, 2 and 17.

use crate::context_rules::{ContextRuleError, ContextRules, SAMPLE_CONTEXTS};
use crate::instruction_elf::{InstructionElf, InstructionElfError, UID_IN_NOTE};
use crate::md5::{DIGEST_BYTES, md5, md5_patched};
use std::ops::Range;
use thiserror::Error;

/// No map, or no file for a context length.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ContextMapError {
    /// A file is not an instruction ELF.
    #[error("context {context}: {source}")]
    File {
        /// Context length of the file.
        context: u32,
        /// What is wrong with it.
        source: InstructionElfError,
    },
    /// The files do not follow the rules.
    #[error(transparent)]
    Rules(#[from] ContextRuleError),
    /// No such context length.
    #[error("a context of {context} positions was asked for; wanted at least 1")]
    Context {
        /// What was asked for.
        context: u32,
    },
}

/// The instruction ELF for a context of 1, and the words in which the others differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextMap {
    file: Vec<u8>,
    rules: ContextRules,
    /// Bytes of the file that are control code.
    text: Range<usize>,
    /// Bytes of the file that are the UID.
    uid: Range<usize>,
}

impl ContextMap {
    /// Compares the whole files for contexts of 1, 2 and 17; the UID alone may differ freely.
    ///
    /// # Errors
    /// Files of different size, files that are no instruction ELF, a word that follows neither rule.
    pub fn derive(one: &[u8], two: &[u8], seventeen: &[u8]) -> Result<Self, ContextMapError> {
        let (text, uid) = parts_of(one).map_err(|source| ContextMapError::File { context: 1, source })?;
        let rules = ContextRules::derive([one, two, seventeen], std::slice::from_ref(&uid))?;
        // Words may follow a rule and still make no file: places and sizes are words too.
        for (file, context) in [two, seventeen].into_iter().zip(&SAMPLE_CONTEXTS[1..]) {
            InstructionElf::parse(file).map_err(|source| ContextMapError::File { context: *context, source })?;
        }
        Ok(Self { file: one.to_vec(), rules, text, uid })
    }

    /// The words that depend on the context length.
    #[must_use]
    pub fn rules(&self) -> &ContextRules {
        &self.rules
    }

    /// The instruction ELF for a context of `context` positions.
    ///
    /// # Errors
    /// [`ContextMapError::Context`] for 0.
    pub fn file(&self, context: u32) -> Result<Vec<u8>, ContextMapError> {
        if context == 0 {
            return Err(ContextMapError::Context { context });
        }
        let mut file = self.file.clone();
        self.rules.apply(context, &mut file);
        let uid = md5(&file[self.text.clone()]);
        file[self.uid.clone()].copy_from_slice(&uid);
        Ok(file)
    }

    /// UIDs of the files for `contexts`; several cost little more than one.
    #[must_use]
    pub fn uids<const L: usize>(&self, contexts: [u32; L]) -> [[u8; DIGEST_BYTES]; L] {
        let words = self.rules.words_in(&self.text).iter();
        let words = words.map(|word| (word.at_bytes - self.text.start, contexts.map(|context| word.value(context))));
        md5_patched(&self.file[self.text.clone()], words)
    }
}

/// Where control code and UID of a file are.
fn parts_of(file: &[u8]) -> Result<(Range<usize>, Range<usize>), InstructionElfError> {
    let elf = InstructionElf::parse(file)?;
    let at_bytes = elf.require_uid()?.at_bytes;
    Ok((elf.text_range()?, at_bytes + UID_IN_NOTE.start..at_bytes + UID_IN_NOTE.end))
}
