//! Conversations and texts that are longer than a small context, cut by a fixed rule.
//!
//! The rule is that of the published xdna1 runtime (64 positions) and holds for any budget of prompt tokens: old turns go
//! first, one by one; then the system message is shortened at a word's end or dropped; then the newest turn keeps its end;
//! then only the newest ids are left. What was lost is recorded ([`Truncation`]).
//!
//! [`fit`] works with any way of rendering messages to ids; [`ChatMl`] is the lane's own: control tokens by id, text as plain
//! text.

use crate::template::ChatMessage;
use crate::text_error::TextError;
use crate::tokenizer::{Specials, Tokenizer};
use npuhal_core::stage::TokenId;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A prompt that cannot be fitted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WindowError {
    /// There is nothing to fit.
    #[error("a conversation needs at least one message")]
    NoMessages,
    /// The prompt is too long and was not to be cut.
    #[error(
        "the prompt has {found} tokens; {budget} fit beside the tokens to generate: shorten it, generate fewer, or allow \
         truncation"
    )]
    TooLong {
        /// Tokens of the prompt.
        found: usize,
        /// Tokens that fit.
        budget: usize,
    },
    /// The tokenizer lacks a control token of the template.
    #[error("the vocabulary has no token {token:?}; the template needs it")]
    NoControlToken {
        /// The token.
        token: &'static str,
    },
    /// Text that cannot be encoded, or a template that fails.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// What becomes of a prompt that is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// It is cut by the rule.
    #[default]
    Truncate,
    /// It is an error.
    Error,
}

impl std::str::FromStr for Overflow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "truncate" => Ok(Self::Truncate),
            "error" => Ok(Self::Error),
            _ => Err(format!("context overflow cannot be '{text}'; allowed: truncate, error")),
        }
    }
}

/// What a conversation lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Truncation {
    /// Messages that are gone, a dropped system message included.
    pub dropped_messages: usize,
    /// The system message lost its end.
    pub truncated_system: bool,
    /// The system message is gone.
    pub dropped_system: bool,
    /// The newest message lost its beginning.
    pub truncated_content: bool,
    /// Only the end of the rendered ids is left.
    pub token_fallback: bool,
}

impl Truncation {
    /// Whether anything was lost.
    #[must_use]
    pub fn is_lossy(&self) -> bool {
        *self != Self::default()
    }
}

/// What a plain text lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PromptTruncation {
    /// Its beginning is gone.
    pub truncated_prompt: bool,
}

/// Ids that fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fitted<T> {
    /// At most as many as the budget.
    pub ids: Vec<TokenId>,
    /// What was lost.
    pub truncation: T,
}

/// Prompt tokens in a context of `positions` that leave room for an answer: one of `max_tokens`, or where no limit is given that
/// the context could keep, all but one position if the `whole` prompt fits so, else room for an answer of some length.
#[must_use]
pub fn budget_beside(max_tokens: Option<usize>, whole: usize, positions: usize) -> usize {
    match max_tokens.filter(|tokens| *tokens < positions) {
        Some(answer) => positions - answer,
        None if whole < positions => positions - 1,
        None => positions - USUAL_ANSWER_TOKENS.min(positions / 2).min(positions.saturating_sub(1)),
    }
}

/// Which turn may come first where older ones have gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstTurn {
    /// Any, as the published rule has it.
    Any,
    /// One of the user: many models' own templates refuse a conversation that begins otherwise.
    User,
}

/// The ids of `messages` within `budget`; `render` gives the ids of a list of messages that is never empty. The system message
/// is the first one if it has that role.
///
/// # Errors
/// [`WindowError`]; errors of `render`.
pub fn fit<E: From<WindowError>>(
    messages: &[ChatMessage],
    budget: usize,
    overflow: Overflow,
    first: FirstTurn,
    render: impl FnMut(&[ChatMessage]) -> Result<Vec<TokenId>, E>,
) -> Result<Fitted<Truncation>, E> {
    if messages.is_empty() {
        return Err(WindowError::NoMessages.into());
    }
    let mut fitter = Fitter { budget, first, render };
    let whole = (fitter.render)(messages)?;
    if whole.len() <= budget {
        return Ok(Fitted { ids: whole, truncation: Truncation::default() });
    }
    match overflow {
        Overflow::Error => Err(WindowError::TooLong { found: whole.len(), budget }.into()),
        Overflow::Truncate => fitter.cut(messages, &whole),
    }
}

/// The newest `budget` ids of a plain text.
///
/// # Errors
/// [`WindowError::TooLong`] where it is not to be cut.
pub fn fit_text(ids: &[TokenId], budget: usize, overflow: Overflow) -> Result<Fitted<PromptTruncation>, WindowError> {
    let truncated_prompt = ids.len() > budget;
    if truncated_prompt && overflow == Overflow::Error {
        return Err(WindowError::TooLong { found: ids.len(), budget });
    }
    Ok(Fitted { ids: newest(ids, budget), truncation: PromptTruncation { truncated_prompt } })
}

fn newest(ids: &[TokenId], budget: usize) -> Vec<TokenId> {
    ids[ids.len().saturating_sub(budget)..].to_vec()
}

struct Fitter<R> {
    budget: usize,
    first: FirstTurn,
    render: R,
}

impl<E, R: FnMut(&[ChatMessage]) -> Result<Vec<TokenId>, E>> Fitter<R> {
    /// The ids of `messages` if they fit.
    fn fitting(&mut self, messages: &[ChatMessage]) -> Result<Option<Vec<TokenId>>, E> {
        let ids = (self.render)(messages)?;
        Ok((ids.len() <= self.budget).then_some(ids))
    }

    fn cut(&mut self, messages: &[ChatMessage], whole: &[TokenId]) -> Result<Fitted<Truncation>, E> {
        let mut truncation = Truncation::default();
        let has_system = messages.len() > 1 && messages[0].role == "system";
        let (system, mut turns) = messages.split_at(usize::from(has_system));
        if let Some((dropped, ids)) = self.fewest_dropped(system, turns)? {
            truncation.dropped_messages = dropped;
            return Ok(Fitted { ids, truncation });
        }
        truncation.dropped_messages = turns.len().saturating_sub(1);
        turns = &turns[truncation.dropped_messages..];
        // There is one: `messages` is not empty, and a lone system message is a turn.
        let Some(turn) = turns.first() else { return Ok(Fitted { ids: newest(whole, self.budget), truncation }) };
        if let Some(system) = system.first() {
            if let Some(ids) = self.cut_system(system, turn)? {
                truncation.truncated_system = true;
                return Ok(Fitted { ids, truncation });
            }
            truncation.dropped_system = true;
            truncation.dropped_messages += 1;
            if let Some(ids) = self.fitting(std::slice::from_ref(turn))? {
                return Ok(Fitted { ids, truncation });
            }
        }
        if let Some(ids) = self.cut_content(turn)? {
            truncation.truncated_content = true;
            return Ok(Fitted { ids, truncation });
        }
        truncation.token_fallback = true;
        Ok(Fitted { ids: newest(whole, self.budget), truncation })
    }

    /// The fewest turns, of several, that must go so that the rest fits. Each that goes makes the prompt shorter, so the number is
    /// searched by halving: a long conversation is not rendered once for each of its turns.
    fn fewest_dropped(
        &mut self,
        system: &[ChatMessage],
        turns: &[ChatMessage],
    ) -> Result<Option<(usize, Vec<TokenId>)>, E> {
        let may_be_first = |turn: &usize| self.first == FirstTurn::Any || turns[*turn].role == "user";
        let numbers: Vec<usize> = (1..turns.len()).filter(may_be_first).collect();
        let (mut low, mut high) = (0, numbers.len());
        let mut found = None;
        while low < high {
            let middle = (low + high) / 2;
            let dropped = numbers[middle];
            let kept: Vec<ChatMessage> = system.iter().chain(&turns[dropped..]).cloned().collect();
            match self.fitting(&kept)? {
                Some(ids) => {
                    found = Some((dropped, ids));
                    high = middle;
                }
                None => low = middle + 1,
            }
        }
        Ok(found)
    }

    /// With as much of the system message's beginning as fits; `None` where not even one character does.
    fn cut_system(&mut self, system: &ChatMessage, turn: &ChatMessage) -> Result<Option<Vec<TokenId>>, E> {
        let text: Vec<char> = system.content.as_deref().unwrap_or_default().chars().collect();
        let largest = self.largest_fitting(text.len(), |fitter, count| {
            let shortened = ChatMessage { content: Some(cut(&text, count)), ..system.clone() };
            fitter.fitting(&[shortened, turn.clone()])
        })?;
        Ok(largest.filter(|(count, _)| *count > 0).map(|(_, ids)| ids))
    }

    /// With as much of the newest message's end as fits, perhaps nothing of it.
    fn cut_content(&mut self, turn: &ChatMessage) -> Result<Option<Vec<TokenId>>, E> {
        let text: Vec<char> = turn.content.as_deref().unwrap_or_default().chars().collect();
        let largest = self.largest_fitting(text.len(), |fitter, count| {
            let end = text[text.len() - count..].iter().collect();
            fitter.fitting(&[ChatMessage { content: Some(end), ..turn.clone() }])
        })?;
        Ok(largest.map(|(_, ids)| ids))
    }

    /// The largest count from 0 to `most` that a binary search finds to fit. Token counts do not strictly grow with the text, so a
    /// larger one may fit too; the one that is returned does.
    fn largest_fitting(
        &mut self,
        most: usize,
        mut attempt: impl FnMut(&mut Self, usize) -> Result<Option<Vec<TokenId>>, E>,
    ) -> Result<Option<(usize, Vec<TokenId>)>, E> {
        let (mut low, mut high) = (0, most);
        let mut found = None;
        while low < high {
            let middle = (low + high).div_ceil(2);
            match attempt(self, middle)? {
                Some(ids) => {
                    found = Some((middle, ids));
                    low = middle;
                }
                None => high = middle - 1,
            }
        }
        match found {
            Some(found) => Ok(Some(found)),
            None => Ok(attempt(self, 0)?.map(|ids| (0, ids))),
        }
    }
}

/// The first `count` characters, back to the last space of what is there (unless it is at the very beginning) where that
/// leaves something out, without white space at the end.
fn cut(text: &[char], count: usize) -> String {
    let piece: String = text[..count].iter().collect();
    let trimmed = piece.trim_end();
    if count == 0 || count == text.len() {
        return trimmed.to_owned();
    }
    match trimmed.rfind(' ') {
        Some(space) if space > 0 => trimmed[..space].trim_end().to_owned(),
        _ => trimmed.to_owned(),
    }
}

/// Tokens of an answer that a cut prompt leaves room for where no limit is given, but never more than half of the context.
const USUAL_ANSWER_TOKENS: usize = 128;
const IM_START: &str = "<|im_start|>";
const IM_END: &str = "<|im_end|>";

/// The lane's chat template: `<|im_start|>ROLE\nCONTENT<|im_end|>\n` for each message, then `<|im_start|>assistant\n`. Control
/// tokens are put in by id; everything else is encoded as plain text, so that a literal `<|im_end|>` in a message stays text.
#[derive(Debug, Clone)]
pub struct ChatMl {
    tokenizer: Tokenizer,
    default_system: String,
    start: TokenId,
    end: TokenId,
    newline: Vec<TokenId>,
    generation: Vec<TokenId>,
}

impl ChatMl {
    /// The template with `default_system` as the system message of conversations that begin with none.
    ///
    /// # Errors
    /// [`WindowError::NoControlToken`], [`WindowError::Text`].
    pub fn new(tokenizer: &Tokenizer, default_system: &str) -> Result<Self, WindowError> {
        let control = |token| {
            let id = tokenizer.token_id(token).filter(|id| tokenizer.is_control(*id));
            id.ok_or(WindowError::NoControlToken { token })
        };
        Ok(Self {
            start: control(IM_START)?,
            end: control(IM_END)?,
            newline: tokenizer.encode("\n", Specials::Plain)?,
            generation: tokenizer.encode("assistant\n", Specials::Plain)?,
            default_system: default_system.to_owned(),
            tokenizer: tokenizer.clone(),
        })
    }

    /// The ids of `messages` as they are, and of the answer's beginning.
    ///
    /// # Errors
    /// [`WindowError::Text`].
    pub fn render(&self, messages: &[ChatMessage]) -> Result<Vec<TokenId>, WindowError> {
        let mut ids = Vec::new();
        for ChatMessage { role, content, .. } in messages {
            ids.push(self.start);
            let text = format!("{role}\n{}", content.as_deref().unwrap_or_default());
            self.tokenizer.encode_into(&text, Specials::Plain, &mut ids)?;
            ids.push(self.end);
            ids.extend(&self.newline);
        }
        ids.push(self.start);
        ids.extend(&self.generation);
        Ok(ids)
    }

    /// The ids of a conversation within `budget`, the default system message put in front where there is none.
    ///
    /// # Errors
    /// [`WindowError`].
    pub fn fit(
        &self,
        messages: &[ChatMessage],
        budget: usize,
        overflow: Overflow,
    ) -> Result<Fitted<Truncation>, WindowError> {
        let has_system = messages.first().is_none_or(|message| message.role == "system");
        let default = (!has_system).then(|| ChatMessage::new("system", self.default_system.as_str()));
        let messages: Vec<ChatMessage> = default.into_iter().chain(messages.iter().cloned()).collect();
        fit(&messages, budget, overflow, FirstTurn::Any, |messages| self.render(messages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_ends_at_a_word() {
        let text: Vec<char> = "ab cd  ef".chars().collect();
        let cuts: Vec<String> = (0..=text.len()).map(|count| cut(&text, count)).collect();
        assert_eq!(cuts, ["", "a", "ab", "ab", "ab", "ab", "ab", "ab", "ab cd", "ab cd  ef"]);
        let leading: Vec<char> = " abc".chars().collect();
        assert_eq!(cut(&leading, 3), " ab", "a space at the very beginning is no word's end");
    }

    /// Turns were dropped one by one, each time rendering all that were left: minutes for one request of thousands.
    #[test]
    fn a_conversation_of_thousands_of_turns_is_rendered_a_few_times() {
        let messages: Vec<ChatMessage> = (0..4096).map(|turn| ChatMessage::new("user", turn.to_string())).collect();
        for (budget, kept) in [(50, 25), (2, 1), (4095, 2047)] {
            let mut rendered = 0;
            let fitted = fit(&messages, budget, Overflow::Truncate, FirstTurn::Any, |messages| {
                rendered += messages.len();
                Ok::<_, WindowError>(vec![7; 2 * messages.len()])
            });
            let fitted = fitted.unwrap();
            assert_eq!((fitted.ids.len(), fitted.truncation.dropped_messages), (2 * kept, 4096 - kept));
            assert!(rendered < 16 * messages.len(), "{rendered} messages were rendered");
        }
    }

    /// Halving tried conversations that begin with an answer, and took what a template says of them for the end of it.
    #[test]
    fn a_template_that_wants_the_user_first_is_asked_for_nothing_else() {
        let role = |turn: usize| if turn.is_multiple_of(2) { "user" } else { "assistant" };
        let messages: Vec<ChatMessage> = (0..9).map(|turn| ChatMessage::new(role(turn), turn.to_string())).collect();
        let render = |messages: &[ChatMessage]| {
            assert_eq!(messages[0].role, "user");
            Ok::<_, WindowError>(vec![7; 2 * messages.len()])
        };
        for (budget, kept) in [(17, 7), (14, 7), (13, 5), (3, 1)] {
            let fitted = fit(&messages, budget, Overflow::Truncate, FirstTurn::User, render).unwrap();
            assert_eq!((fitted.ids.len(), fitted.truncation.dropped_messages), (2 * kept, 9 - kept), "{budget}");
        }
        let fitted = fit(&messages, 17, Overflow::Truncate, FirstTurn::Any, |messages| {
            Ok::<_, WindowError>(vec![7; 2 * messages.len()])
        });
        assert_eq!(fitted.unwrap().truncation.dropped_messages, 1, "the published rule");
    }
}
