//! Bodies of requests: bounded in size and in time before anything is kept of them.

use super::error::ApiError;
use axum::body::Body;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use std::time::Duration;

/// Reads a body of at most `limit_bytes` within `limit`.
pub(super) async fn body(
    headers: &HeaderMap,
    body: Body,
    limit_bytes: usize,
    limit: Duration,
) -> Result<Vec<u8>, ApiError> {
    let claimed = match headers.get(header::CONTENT_LENGTH) {
        Some(value) => {
            let length = value.to_str().ok().and_then(|text| text.parse::<u64>().ok());
            Some(length.ok_or_else(|| ApiError::bad_body("invalid_length", "Content-Length must be an integer"))?)
        }
        None if headers.contains_key(header::TRANSFER_ENCODING) => None,
        None => return Err(ApiError::length_required()),
    };
    if claimed == Some(0) {
        return Err(ApiError::bad_body("empty_body", "request body cannot be empty"));
    }
    if claimed.is_some_and(|claimed| claimed > limit_bytes as u64) {
        return Err(ApiError::body_too_large(limit_bytes));
    }
    let reading = async {
        let mut body = body;
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| ApiError::bad_body("broken_body", "the request body broke off"))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > limit_bytes {
                return Err(ApiError::body_too_large(limit_bytes));
            }
            bytes.extend_from_slice(&data);
        }
        Ok(bytes)
    };
    let bytes = tokio::time::timeout(limit, reading).await.map_err(|_| ApiError::body_timed_out())??;
    if bytes.is_empty() {
        return Err(ApiError::bad_body("empty_body", "request body cannot be empty"));
    }
    Ok(bytes)
}
