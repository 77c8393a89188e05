//! Thoughts of models that think before they answer: what stands between `<think>` and `</think>`, told from the answer.
//!
//! There is one parser for streams and whole texts. A block of thoughts is entered only before any answer, with nothing but
//! white space before it; the text may also begin inside one, because the template has opened it. A block that is not closed is
//! all thoughts. White space at the start of either part is dropped.

use crate::text_error::TextError;
use crate::tokenizer::{ControlTokens, Specials, Tokenizer};
use npuhal_core::stage::TokenId;

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";
/// Ids at the end of a prompt among which a template may open a block of thoughts.
const TAIL_IDS: usize = 16;

/// How a model thinks before one answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Thinking {
    /// Whether the prompt has opened a block of thoughts ([`prompt_opens_thoughts`]).
    pub opened: bool,
    /// Tokens of thoughts at most; then the block is closed for the model, which goes on behind it.
    pub budget: Option<usize>,
    /// What closes a block: [`closing_ids`]. Without it, or without room for an answer, a used-up budget ends the answer.
    pub closing: Vec<TokenId>,
}

/// Text, told apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Thoughts {
    /// What the model thought.
    pub reasoning: String,
    /// What it says.
    pub answer: String,
}

impl Thoughts {
    /// Tells a whole text apart; `opened` where the prompt has opened a block of thoughts.
    #[must_use]
    pub fn split(text: &str, opened: bool) -> Self {
        let mut parser = ThoughtParser::new(opened);
        let mut thoughts = parser.push(text);
        thoughts.append(parser.flush());
        thoughts
    }

    /// Puts what follows behind.
    pub fn append(&mut self, other: Self) {
        self.reasoning.push_str(&other.reasoning);
        self.answer.push_str(&other.answer);
    }
}

/// Tells a stream of text apart.
#[derive(Debug, Clone)]
pub struct ThoughtParser {
    state: State,
    /// White space, or what may be the beginning of a tag: shorter than the longest tag.
    held: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No answer yet, no block open.
    Before,
    /// In a block; `begun` once it has text.
    Thinking { begun: bool },
    /// The answer has begun: no tag is looked for any more.
    Answering,
}

impl ThoughtParser {
    /// A parser at the start of what a model says; `opened` where the prompt has opened a block of thoughts.
    #[must_use]
    pub fn new(opened: bool) -> Self {
        let state = if opened { State::Thinking { begun: false } } else { State::Before };
        Self { state, held: String::new() }
    }

    /// A parser for what follows `prompt`.
    #[must_use]
    pub fn after(prompt: &str) -> Self {
        Self::new(opens_thoughts(prompt))
    }

    /// Whether a block of thoughts is open.
    #[must_use]
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking { .. })
    }

    /// What `text` makes certain.
    pub fn push(&mut self, text: &str) -> Thoughts {
        let mut thoughts = Thoughts::default();
        if self.state == State::Answering {
            thoughts.answer.push_str(text);
            return thoughts;
        }
        let all = [std::mem::take(&mut self.held).as_str(), text].concat();
        let mut rest = Some(all.as_str());
        while let Some(text) = rest {
            rest = self.step(text, &mut thoughts);
        }
        thoughts
    }

    /// The rest at the end: the beginning of a tag that did not come is text. Afterwards a new text begins, outside a block.
    pub fn flush(&mut self) -> Thoughts {
        let held = std::mem::take(&mut self.held);
        let mut thoughts = Thoughts::default();
        match self.state {
            State::Thinking { begun } => thoughts.reasoning = if begun { held } else { held.trim_start().to_owned() },
            State::Before | State::Answering => thoughts.answer = held.trim_start().to_owned(),
        }
        self.state = State::Before;
        thoughts
    }

    /// Works through `text` up to the next tag; returns what stands behind it.
    fn step<'t>(&mut self, text: &'t str, thoughts: &mut Thoughts) -> Option<&'t str> {
        match self.state {
            State::Before => {
                let begun = text.trim_start();
                if let Some(rest) = begun.strip_prefix(OPEN) {
                    self.state = State::Thinking { begun: false };
                    return Some(rest);
                }
                if OPEN.starts_with(begun) {
                    begun.clone_into(&mut self.held);
                } else {
                    self.state = State::Answering;
                    thoughts.answer.push_str(begun);
                }
                None
            }
            State::Thinking { begun } => {
                let (inside, rest) = match text.split_once(CLOSE) {
                    Some((inside, rest)) => (inside, Some(rest)),
                    None => {
                        let certain = text.len() - beginning_of(CLOSE, text);
                        text[certain..].clone_into(&mut self.held);
                        (&text[..certain], None)
                    }
                };
                let inside = if begun { inside } else { inside.trim_start() };
                thoughts.reasoning.push_str(inside);
                self.state = match rest {
                    Some(_) => State::Before,
                    None => State::Thinking { begun: begun || !inside.is_empty() },
                };
                rest
            }
            State::Answering => {
                thoughts.answer.push_str(text);
                None
            }
        }
    }
}

/// Whether `prompt` ends inside a block of thoughts that it has just opened.
#[must_use]
pub fn opens_thoughts(prompt: &str) -> bool {
    prompt.trim_end().ends_with(OPEN)
}

/// Whether the ids of `prompt` end in an opened block of thoughts.
#[must_use]
pub fn prompt_opens_thoughts(tokenizer: &Tokenizer, prompt: &[TokenId]) -> bool {
    let tail = &prompt[prompt.len().saturating_sub(TAIL_IDS)..];
    opens_thoughts(&tokenizer.decode(tail, ControlTokens::Show))
}

/// The ids that end a block of thoughts, for a model that has thought long enough.
///
/// # Errors
/// As [`Tokenizer::encode`].
pub fn closing_ids(tokenizer: &Tokenizer) -> Result<Vec<TokenId>, TextError> {
    tokenizer.encode(&format!("\n{CLOSE}\n\n"), Specials::Parse)
}

/// Bytes at the end of `text` that begin `tag` and do not end it.
fn beginning_of(tag: &str, text: &str) -> usize {
    (1..tag.len()).rev().find(|len| text.ends_with(&tag[..*len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(text: &str, opened: bool) -> (String, String) {
        let Thoughts { reasoning, answer } = Thoughts::split(text, opened);
        (reasoning, answer)
    }

    fn parts(reasoning: &str, answer: &str) -> (String, String) {
        (reasoning.to_owned(), answer.to_owned())
    }

    #[test]
    fn thoughts_stand_before_the_answer() {
        assert_eq!(split("<think>\nhm\n</think>\n\nyes\n", false), parts("hm\n", "yes\n"));
        assert_eq!(split(" \n<think>a</think>b", false), parts("a", "b"));
        assert_eq!(split("<think></think>b", false), parts("", "b"));
        assert_eq!(
            split("<think>a</think> <think>b</think> c <think>d</think>", false),
            parts("ab", "c <think>d</think>")
        );
        assert_eq!(split("b <think>a</think>", false), parts("", "b <think>a</think>"));
        assert_eq!(split("  b", false), parts("", "b"));
    }

    #[test]
    fn a_block_that_is_not_closed_is_thoughts() {
        assert_eq!(split("<think>a </thi", false), parts("a </thi", ""));
        assert_eq!(split("\na", true), parts("a", ""));
        assert_eq!(split("a</think>\n b", true), parts("a", "b"));
        assert_eq!(split("<think>", false), parts("", ""));
        assert_eq!(split(" <thin", false), parts("", "<thin"));
        assert_eq!(split("<think>a<</think>b", false), parts("a<", "b"));
    }

    #[test]
    fn text_is_held_back_only_while_it_may_be_a_tag() {
        let mut parser = ThoughtParser::new(false);
        assert_eq!(parser.push("\n<th"), Thoughts::default());
        assert_eq!(parser.push("ink>x<"), Thoughts { reasoning: "x".into(), answer: String::new() });
        assert!(parser.is_thinking());
        assert_eq!(parser.push("3 </think"), Thoughts { reasoning: "<3 ".into(), answer: String::new() });
        assert_eq!(parser.push(">\n"), Thoughts::default());
        assert!(!parser.is_thinking());
        assert_eq!(parser.push("so <think>"), Thoughts { reasoning: String::new(), answer: "so <think>".into() });
        assert_eq!(parser.flush(), Thoughts::default());
    }

    #[test]
    fn templates_may_open_a_block() {
        assert!(opens_thoughts("<|im_start|>assistant\n<think>\n") && ThoughtParser::after("<think>").is_thinking());
        assert!(!opens_thoughts("<think>\n\n</think>\n\n") && !opens_thoughts(""));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn the_stream_equals_the_whole(
            text in "(<think>|</think>|<|</|think|>|a| |\n|é|🙂|<thi|nk>){0,16}",
            opened in any::<bool>(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let mut borders: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
            let mut at: Vec<usize> = cuts.iter().map(|cut| borders[cut.index(borders.len())]).collect();
            at.extend([0, text.len()]);
            at.sort_unstable();
            borders.clear();
            let mut parser = ThoughtParser::new(opened);
            let mut streamed = Thoughts::default();
            for pair in at.windows(2) {
                streamed.append(parser.push(&text[pair[0]..pair[1]]));
            }
            streamed.append(parser.flush());
            prop_assert_eq!(streamed, Thoughts::split(&text, opened));
        }
    }
}
