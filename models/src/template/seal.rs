//! Keeps text of messages from becoming control tokens.
//!
//! Before rendering, every place in a message's strings where a control token's literal begins (or could begin, once the
//! template has trimmed and joined) gets a *seal* after its first character: one character that occurs nowhere else. Control
//! tokens are then looked for in the rendered text, and the seals are taken out of what lies between.

use crate::text_error::TextError;
use crate::tokenizer::Tokenizer;
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Noncharacters, then two private-use planes: what a seal is chosen from.
const CANDIDATES: [std::ops::RangeInclusive<u32>; 3] = [0xFDD0..=0xFDEF, 0xF_0000..=0xF_FFFD, 0x10_0000..=0x10_FFFD];

/// Tags of a template that are kept whole in messages; real templates look for a dozen.
const MAX_TAGS: usize = 1000;

/// Where seals go, and which character they are.
#[derive(Debug)]
pub(super) struct Seal {
    char: char,
    /// Literals of control tokens, by their first character.
    literals: HashMap<char, Vec<String>>,
    /// Texts that templates look for in messages: user-defined tokens and the template's own tags. They stay whole.
    kept: HashMap<char, HashSet<String>>,
}

impl Seal {
    /// A seal for `tokenizer`'s control tokens that occurs neither in `template` nor in a string of `values`.
    pub(super) fn new<'v>(
        tokenizer: &Tokenizer,
        template: &str,
        values: impl Iterator<Item = &'v Value>,
    ) -> Result<Self, TextError> {
        let mut used: HashSet<char> = template.chars().collect();
        values.for_each(|value| collect_chars(value, &mut used));
        let mut candidates = CANDIDATES.into_iter().flatten().filter_map(char::from_u32);
        let char = candidates.find(|c| !used.contains(c)).ok_or(TextError::NoSeal)?;
        let mut literals: HashMap<char, Vec<String>> = HashMap::new();
        for text in tokenizer.control_ids().filter_map(|id| tokenizer.token_text(id)) {
            if let Some(first) = text.chars().next() {
                literals.entry(first).or_default().push(text.to_owned());
            }
        }
        let is_control = |tag: &str| tokenizer.token_id(tag).is_some_and(|id| tokenizer.is_control(id));
        let tags = tags(template).filter(|tag| !is_control(tag)).take(MAX_TAGS);
        let mut kept: HashMap<char, HashSet<String>> = HashMap::new();
        for text in tokenizer.user_defined().chain(tags) {
            if let Some(first) = text.chars().next() {
                kept.entry(first).or_default().insert(text.to_owned());
            }
        }
        Ok(Self { char, literals, kept })
    }

    /// Seals every string in `value`, keys of maps included.
    pub(super) fn seal_value(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.seal(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.seal_value(item)),
            Value::Object(map) => {
                *map = std::mem::take(map)
                    .into_iter()
                    .map(|(key, mut item)| {
                        self.seal_value(&mut item);
                        (self.seal(&key), item)
                    })
                    .collect();
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// `text` with a seal after the first character of everything that is, or begins like, a control token.
    pub(super) fn seal(&self, text: &str) -> String {
        let mut sealed = String::with_capacity(text.len() + 8);
        for (at, char) in text.char_indices() {
            sealed.push(char);
            if self.is_dangerous(&text[at..], char) {
                sealed.push(self.char);
            }
        }
        sealed
    }

    /// `text` without its seals.
    pub(super) fn unseal(&self, text: &str) -> String {
        text.replace(self.char, "")
    }

    fn is_dangerous(&self, rest: &str, first: char) -> bool {
        let Some(literals) = self.literals.get(&first) else { return false };
        // Words are left alone unless they are the whole literal: templates compare them.
        let may_begin = !first.is_alphanumeric() && !self.is_kept(rest, first);
        may_begin || literals.iter().any(|literal| rest.starts_with(&**literal))
    }

    fn is_kept(&self, rest: &str, first: char) -> bool {
        self.kept.get(&first).is_some_and(|kept| kept.iter().any(|kept| rest.starts_with(&**kept)))
    }
}

fn collect_chars(value: &Value, used: &mut HashSet<char>) {
    // The candidates all lie beyond this.
    let mut collect = |text: &str| used.extend(text.chars().filter(|c| *c as u32 >= *CANDIDATES[0].start()));
    match value {
        Value::String(text) => collect(text),
        Value::Array(items) => items.iter().for_each(|item| collect_chars(item, used)),
        Value::Object(map) => {
            map.keys().for_each(|key| collect(key));
            map.values().for_each(|item| collect_chars(item, used));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Substrings of `template` that look like tags: `<think>`, `</tool_call>`, `[/INST]`.
fn tags(template: &str) -> impl Iterator<Item = &str> {
    template.char_indices().filter_map(move |(at, char)| {
        let close = match char {
            '<' => '>',
            '[' => ']',
            _ => return None,
        };
        let inside = &template[at + 1..];
        let end = inside.find(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '-' | '/' | '|')))?;
        (end > 0 && inside[end..].starts_with(close)).then(|| &template[at..at + 1 + end + 1])
    })
}
