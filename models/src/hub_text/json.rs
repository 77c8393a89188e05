//! The JSON of the files, with bounds on its lists.

use super::{MAX_MERGES, MAX_TOKENS};
use crate::text_error::TextError;
use serde::de::{DeserializeOwned, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use std::fmt;

/// `bytes` of the file `name`.
pub(super) fn parse<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<T, TextError> {
    serde_json::from_slice(bytes)
        .map_err(|error| TextError::TokenizerFile { file: name.to_owned(), reason: error.to_string() })
}

/// `tokenizer.json`.
#[derive(Debug, Deserialize)]
pub(super) struct TokenizerJson {
    #[serde(default)]
    pub(super) added_tokens: Vec<AddedJson>,
    #[serde(default)]
    pub(super) normalizer: Option<Value>,
    #[serde(default)]
    pub(super) pre_tokenizer: Option<Value>,
    #[serde(default)]
    pub(super) post_processor: Option<Value>,
    #[serde(default)]
    pub(super) decoder: Option<Value>,
    pub(super) model: ModelJson,
}

/// An element of `added_tokens`, and of `added_tokens_decoder` where the id is the key.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct AddedJson {
    #[serde(default)]
    pub(super) id: Option<u64>,
    pub(super) content: String,
    #[serde(default)]
    pub(super) single_word: bool,
    #[serde(default)]
    pub(super) lstrip: bool,
    #[serde(default)]
    pub(super) rstrip: bool,
    #[serde(default)]
    pub(super) normalized: Option<bool>,
    #[serde(default)]
    pub(super) special: bool,
}

/// `model`.
#[derive(Debug, Deserialize)]
pub(super) struct ModelJson {
    #[serde(default)]
    pub(super) r#type: Option<String>,
    pub(super) vocab: VocabJson,
    #[serde(default)]
    pub(super) merges: Option<MergesJson>,
    #[serde(default)]
    pub(super) unk_token: Option<String>,
    #[serde(default)]
    pub(super) unk_id: Option<u64>,
    #[serde(default)]
    pub(super) byte_fallback: Option<bool>,
    #[serde(default)]
    pub(super) fuse_unk: Option<bool>,
    #[serde(default)]
    pub(super) ignore_merges: Option<bool>,
    #[serde(default)]
    pub(super) dropout: Option<f64>,
    #[serde(default)]
    pub(super) continuing_subword_prefix: Option<String>,
    #[serde(default)]
    pub(super) end_of_word_suffix: Option<String>,
}

/// Tokens by text with their ids, or in the order of their ids with their scores.
#[derive(Debug)]
pub(super) enum VocabJson {
    Ids(Vec<(String, u32)>),
    Scores(Vec<(String, f64)>),
}

impl<'de> Deserialize<'de> for VocabJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = VocabJson;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of ids by token, or a list of pairs of token and score")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut ids = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    check_count(ids.len(), MAX_TOKENS, "tokens")?;
                    ids.push(entry);
                }
                Ok(VocabJson::Ids(ids))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut scores = Vec::new();
                while let Some(entry) = seq.next_element()? {
                    check_count(scores.len(), MAX_TOKENS, "tokens")?;
                    scores.push(entry);
                }
                Ok(VocabJson::Scores(scores))
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

/// Merges, each as `left right`; read from such strings or from pairs.
#[derive(Debug, Clone, Default)]
pub(super) struct MergesJson(pub(super) Vec<String>);

impl<'de> Deserialize<'de> for MergesJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Merge {
            Text(String),
            Pair(String, String),
        }
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = MergesJson;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of merges")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut merges = Vec::new();
                while let Some(merge) = seq.next_element()? {
                    check_count(merges.len(), MAX_MERGES, "merges")?;
                    merges.push(match merge {
                        Merge::Text(text) => text,
                        Merge::Pair(left, right) if left.contains(' ') || right.contains(' ') => {
                            let message = format!("merge {}: tokens with spaces are not supported", merges.len());
                            return Err(A::Error::custom(message));
                        }
                        Merge::Pair(left, right) => [&left, " ", &right].concat(),
                    });
                }
                Ok(MergesJson(merges))
            }
        }
        deserializer.deserialize_seq(Reader)
    }
}

fn check_count<E: Error>(count: usize, limit: usize, what: &str) -> Result<(), E> {
    if count < limit { Ok(()) } else { Err(E::custom(format!("wanted at most {limit} {what}, found more"))) }
}

/// `tokenizer_config.json`, and `special_tokens_map.json`, which has some of its fields.
#[derive(Debug, Default, Deserialize)]
pub(super) struct TokenizerConfigJson {
    #[serde(default)]
    pub(super) added_tokens_decoder: Option<Map<String, Value>>,
    #[serde(default)]
    pub(super) additional_special_tokens: Option<Vec<Named>>,
    #[serde(default)]
    pub(super) extra_special_tokens: Option<Value>,
    #[serde(default)]
    bos_token: Option<Named>,
    #[serde(default)]
    eos_token: Option<Named>,
    #[serde(default)]
    pad_token: Option<Named>,
    #[serde(default)]
    unk_token: Option<Named>,
    #[serde(default)]
    pub(super) add_bos_token: Option<bool>,
    #[serde(default)]
    pub(super) chat_template: Option<Value>,
}

impl TokenizerConfigJson {
    pub(super) fn bos_token(&self) -> Option<String> {
        self.bos_token.as_ref().map(Named::text)
    }

    pub(super) fn eos_token(&self) -> Option<String> {
        self.eos_token.as_ref().map(Named::text)
    }

    pub(super) fn pad_token(&self) -> Option<String> {
        self.pad_token.as_ref().map(Named::text)
    }

    /// Everything that is named as a special token.
    pub(super) fn specials(&self) -> impl Iterator<Item = String> + '_ {
        let roles = [&self.bos_token, &self.eos_token, &self.pad_token, &self.unk_token].into_iter().flatten();
        let extra = match &self.extra_special_tokens {
            Some(Value::Object(map)) => map.values().filter_map(Value::as_str).map(str::to_owned).collect(),
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            _ => Vec::new(),
        };
        roles.chain(self.additional_special_tokens.iter().flatten()).map(Named::text).chain(extra)
    }
}

/// A token by its text, alone or in an object with its flags.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Named {
    Text(String),
    Token {
        /// Its text.
        content: String,
    },
}

impl Named {
    fn text(&self) -> String {
        match self {
            Self::Text(text) | Self::Token { content: text } => text.clone(),
        }
    }
}

/// One id or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum IdOrIds {
    One(u64),
    Several(Vec<u64>),
}

impl IdOrIds {
    pub(super) fn into_vec(self) -> Vec<u64> {
        match self {
            Self::One(id) => vec![id],
            Self::Several(ids) => ids,
        }
    }
}
