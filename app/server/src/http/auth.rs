//! The bearer key.

use super::Shared;
use super::error::ApiError;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Response, header};
use axum::middleware::Next;
use std::fmt;
use subtle::ConstantTimeEq;

/// The key that clients must send as `Authorization: Bearer <key>`.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// The key `key`.
    ///
    /// # Errors
    /// The rule it breaks: a key has 8 to 512 characters without spaces.
    pub fn new(key: impl Into<String>) -> Result<Self, String> {
        let key = key.into();
        if !(8..=512).contains(&key.len()) || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("an API key has 8 to 512 printable ASCII characters and no spaces".to_owned());
        }
        Ok(Self(key))
    }

    /// A key of 256 random bits.
    ///
    /// # Errors
    /// Where the system has no random numbers to give, in words.
    pub fn random() -> Result<Self, String> {
        let bytes = super::random::<32>().map_err(|error| format!("the system gives no random numbers: {error}"))?;
        Ok(Self(format!("sk-{}", super::hex(&bytes))))
    }

    /// The key, to be shown once.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Compared in a time that tells nothing of the key's bytes.
    fn admits(&self, value: Option<&HeaderValue>) -> bool {
        let given = value.map(HeaderValue::as_bytes).unwrap_or_default();
        let is_bearer = given.len() >= 7 && given[..7].eq_ignore_ascii_case(b"bearer ");
        let given = given.get(7..).unwrap_or_default();
        is_bearer & bool::from(given.ct_eq(self.0.as_bytes()))
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(hidden)")
    }
}

pub(super) async fn check(State(service): State<Shared>, request: Request, next: Next) -> Response<Body> {
    match &service.api_key {
        Some(key) if !key.admits(request.headers().get(header::AUTHORIZATION)) => {
            let (parts, body) = request.into_parts();
            super::read::discard(&parts.headers, body).await;
            ApiError::unauthorized().into_response()
        }
        _ => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_key_admits() {
        let key = ApiKey::new("secret-key").unwrap();
        let admits = |bytes: &[u8]| key.admits(HeaderValue::from_bytes(bytes).ok().as_ref());
        assert!(admits(b"Bearer secret-key"));
        assert!(admits(b"bearer secret-key"));
        for wrong in [&b"Bearer secret-ke"[..], b"Bearer secret-key ", b"secret-key", b"", b"Bearer \xe9\xff"] {
            assert!(!admits(wrong), "{wrong:?}");
        }
        assert!(!key.admits(None));
    }

    #[test]
    fn keys_are_checked_and_not_shown() {
        assert!(ApiKey::new("short").is_err());
        assert!(ApiKey::new("with a space").is_err());
        assert_ne!(ApiKey::random().unwrap(), ApiKey::random().unwrap());
        assert_eq!(format!("{:?}", ApiKey::random().unwrap()), "ApiKey(hidden)");
    }
}
