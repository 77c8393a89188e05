//! JSON configuration files: bounded reading, and typed access whose errors name file and key.

use crate::error::ModelError;
use npuhal_core::stage::TokenId;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The members of the object in the JSON file at `path`, of at most `limit_bytes`.
///
/// # Errors
/// [`ModelError::Io`], [`ModelError::Malformed`].
pub(crate) fn read_object(path: &Path, limit_bytes: u64) -> Result<Map<String, Value>, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let malformed = |reason| ModelError::Malformed { path: path.to_owned(), field: "the text".to_owned(), reason };
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(malformed("wanted a regular file, found something else".to_owned()));
    }
    let mut text = Vec::new();
    File::open(path).map_err(io)?.take(limit_bytes + 1).read_to_end(&mut text).map_err(io)?;
    if text.len() as u64 > limit_bytes {
        return Err(malformed(format!("wanted at most {limit_bytes} bytes, found more")));
    }
    serde_json::from_slice(&text).map_err(|error| malformed(format!("wanted a JSON object: {error}")))
}

/// Typed access to the members of an object in the file at `path`. Null counts as absent.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    pub(crate) path: &'a Path,
    pub(crate) map: &'a Map<String, Value>,
    /// What to do where a required key is missing.
    pub(crate) remedy: &'static str,
}

impl<'a> Keys<'a> {
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn malformed(&self, key: &str, reason: String) -> ModelError {
        ModelError::Malformed { path: self.path.to_owned(), field: key.to_owned(), reason }
    }

    pub(crate) fn unsupported(&self, feature: impl Into<String>, supported: &str) -> ModelError {
        ModelError::Unsupported { path: self.path.to_owned(), feature: feature.into(), supported: supported.to_owned() }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<String>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let text =
            value.as_str().ok_or_else(|| self.malformed(key, format!("wanted a text, found {}", short(value))))?;
        Ok(Some(text.to_owned()))
    }

    pub(crate) fn size(&self, key: &str, limit: u64) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().filter(|size| (1..=limit).contains(size)).and_then(|size| usize::try_from(size).ok());
        size.map(Some)
            .ok_or_else(|| self.malformed(key, format!("wanted a number from 1 to {limit}, found {}", short(value))))
    }

    pub(crate) fn require(&self, key: &str, limit: u64) -> Result<usize, ModelError> {
        self.size(key, limit)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn missing(&self, key: &str) -> ModelError {
        ModelError::Missing { path: self.path.to_owned(), what: key.to_owned(), remedy: self.remedy.to_owned() }
    }

    pub(crate) fn positive(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().map(|value| value as f32).filter(|value| *value > 0.0 && value.is_finite());
        number.map(Some).ok_or_else(|| self.malformed(key, format!("wanted a positive number, found {}", short(value))))
    }

    /// An id or several, ascending.
    pub(crate) fn ids(&self, key: &str) -> Result<Vec<TokenId>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let stated = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let id = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
        let ids = stated.iter().map(id).collect::<Option<Vec<_>>>();
        let mut ids =
            ids.ok_or_else(|| self.malformed(key, format!("wanted a token id or several, found {}", short(value))))?;
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// A bool; absent is false.
    pub(crate) fn flag(&self, key: &str) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => {
                value.as_bool().ok_or_else(|| self.malformed(key, format!("wanted a bool, found {}", short(value))))
            }
        }
    }

    /// A positive number; neither infinite nor 0 as f32.
    pub(crate) fn require_positive(&self, key: &str) -> Result<f32, ModelError> {
        self.positive(key)?.ok_or_else(|| self.missing(key))
    }

    /// An object.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Keys<'a>>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys { map, ..*self })),
            Some(value) => Err(self.malformed(key, format!("wanted an object, found {}", short(value)))),
        }
    }

    /// An array of `len` elements, each turned by `element`; `wanted` names the element.
    pub(crate) fn array<T>(
        &self,
        key: &str,
        len: usize,
        wanted: &str,
        element: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let found = value.as_array().filter(|array| array.len() == len);
        let turned = found.and_then(|array| array.iter().map(element).collect::<Option<Vec<T>>>());
        let bad = || self.malformed(key, format!("wanted {len} times {wanted}, found {}", short(value)));
        turned.map(Some).ok_or_else(bad)
    }
}

/// A value for a message, clipped.
pub(crate) fn short(value: &impl ToString) -> String {
    const CLIP: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(CLIP) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
