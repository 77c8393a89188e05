//! Bodies of requests: bounded in size and in time before anything is kept of them.

use super::error::ApiError;
use axum::body::Body;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use std::time::Duration;

/// Bytes and time for which the body of a refused request is read on.
const DISCARDED_BYTES: usize = 8 << 20;
const DISCARDING_LIMIT: Duration = Duration::from_secs(1);

/// Reads on for a moment and keeps nothing: a client that is still sending when its connection is closed would not get to see
/// why it was refused.
pub(super) async fn discard(headers: &HeaderMap, mut body: Body) {
    // A client that asks first has not begun to send.
    if headers.contains_key(header::EXPECT) {
        return;
    }
    let reading = async {
        let mut left = DISCARDED_BYTES;
        while left > 0
            && let Some(Ok(frame)) = body.frame().await
        {
            left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len()));
        }
    };
    // Whoever is not done by then has been waited for.
    let _ = tokio::time::timeout(DISCARDING_LIMIT, reading).await;
}

/// Reads a body of at most `limit_bytes` within `limit`.
pub(super) async fn body(
    headers: &HeaderMap,
    body: Body,
    limit_bytes: usize,
    limit: Duration,
) -> Result<Vec<u8>, ApiError> {
    // One that is no number has not come through the reader of heads.
    let claimed = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if claimed.is_none() && !headers.contains_key(header::TRANSFER_ENCODING) {
        return Err(ApiError::length_required());
    }
    if claimed == Some(0) {
        return Err(ApiError::bad_body("empty_body", "request body cannot be empty"));
    }
    if claimed.is_some_and(|claimed| claimed > limit_bytes as u64) {
        discard(headers, body).await;
        return Err(ApiError::body_too_large(limit_bytes));
    }
    let reading = async {
        let mut body = body;
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| ApiError::bad_body("broken_body", "the request body broke off"))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > limit_bytes {
                discard(headers, body).await;
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
