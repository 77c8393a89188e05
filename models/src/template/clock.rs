//! `strftime` for templates that state the date.

use super::zone::Offset;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A moment, split into what calendars show.
#[derive(Debug)]
struct Civil {
    year: i64,
    /// From 0.
    month: usize,
    /// From 1.
    day: u64,
    /// From 1.
    day_of_year: u64,
    /// From Sunday, 0.
    weekday: usize,
    /// Seconds since midnight.
    second: u64,
}

impl Civil {
    /// By Howard Hinnant's `civil_from_days`.
    fn new(now: SystemTime, offset: &Offset) -> Self {
        let seconds = (unix(now) + offset.seconds).max(0) as u64;
        let days = seconds / 86_400;
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let day_of_era = shifted % 146_097;
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let day = day_from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = ((month_from_march + 2) % 12) as usize;
        let year = (year_of_era + era * 400) as i64 + i64::from(month < 2);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month];
        let day_of_year = before + day + u64::from(leap && month > 1);
        Self { year, month, day, day_of_year, weekday: ((days + 4) % 7) as usize, second: seconds % 86_400 }
    }
}

/// Seconds since 1970; moments before and beyond all calendars are its ends.
pub(super) fn unix(now: SystemTime) -> i64 {
    const LAST: u64 = 1 << 40;
    now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().min(LAST)) as i64
}

/// `now` in universal time and in `format`, as templates' `strftime_now` writes it.
#[must_use]
pub fn strftime_utc(now: SystemTime, format: &str) -> String {
    strftime(now, &Offset::utc(), format)
}

/// `now` in `format`, with the directives of C's `strftime` that need no locale; `%-d` and its like leave out the padding. An
/// unknown directive stays as it is.
pub(super) fn strftime(now: SystemTime, offset: &Offset, format: &str) -> String {
    let civil = Civil::new(now, offset);
    let mut text = String::with_capacity(format.len());
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            text.push(char);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        match directive {
            Some(directive) => write_directive(&civil, offset, directive, padded, &mut text),
            None => text.push('%'),
        }
    }
    text
}

fn write_directive(civil: &Civil, offset: &Offset, directive: char, padded: bool, text: &mut String) {
    let (hour, minute, second) = (civil.second / 3600, civil.second / 60 % 60, civil.second % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let month = civil.month as u64 + 1;
    let mut put = |value: u64, width: usize| {
        let width = if padded { width } else { 0 };
        let _ = write!(text, "{value:0width$}");
    };
    match directive {
        'Y' => put(civil.year.unsigned_abs(), 4),
        'y' => put(civil.year.unsigned_abs() % 100, 2),
        'm' => put(month, 2),
        'd' => put(civil.day, 2),
        'j' => put(civil.day_of_year, 3),
        'H' => put(hour, 2),
        'I' => put(hour12, 2),
        'M' => put(minute, 2),
        'S' => put(second, 2),
        'e' => {
            let _ = if padded { write!(text, "{:2}", civil.day) } else { write!(text, "{}", civil.day) };
        }
        'B' => text.push_str(MONTHS[civil.month]),
        'b' | 'h' => text.push_str(&MONTHS[civil.month][..3]),
        'A' => text.push_str(DAYS[civil.weekday]),
        'a' => text.push_str(&DAYS[civil.weekday][..3]),
        'w' => put(civil.weekday as u64, 1),
        'p' => text.push_str(if hour < 12 { "AM" } else { "PM" }),
        'F' => {
            let _ = write!(text, "{:04}-{month:02}-{:02}", civil.year, civil.day);
        }
        'D' | 'x' => {
            let _ = write!(text, "{month:02}/{:02}/{:02}", civil.day, civil.year % 100);
        }
        'T' | 'X' => {
            let _ = write!(text, "{hour:02}:{minute:02}:{second:02}");
        }
        'R' => {
            let _ = write!(text, "{hour:02}:{minute:02}");
        }
        'Z' => text.push_str(&offset.name),
        'z' => {
            let (sign, east) = (if offset.seconds < 0 { '-' } else { '+' }, offset.seconds.unsigned_abs());
            let _ = write!(text, "{sign}{:02}{:02}", east / 3600, east / 60 % 60);
        }
        'n' => text.push('\n'),
        't' => text.push('\t'),
        '%' => text.push('%'),
        other => {
            text.push('%');
            text.push(other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Wanted texts are those of CPython's `datetime.strftime` in the C locale.
    #[test]
    fn dates_as_python_writes_them() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let strftime = |now, format: &str| strftime(now, &Offset::utc(), format);
        assert_eq!(strftime(at(0), "%d %b %Y, %A %H:%M:%S %j"), "01 Jan 1970, Thursday 00:00:00 001");
        assert_eq!(strftime(at(951_782_399), "%Y-%m-%d %-d.%-m. %I %p %a %B"), "2000-02-28 28.2. 11 PM Mon February");
        assert_eq!(strftime(at(951_782_400), "%F %j %e"), "2000-02-29 060 29");
        assert_eq!(strftime(at(1_735_689_599), "%D %T %y %j"), "12/31/24 23:59:59 24 366");
        assert_eq!(strftime(at(1_735_689_600), "100%% %Q %"), "100% %Q %");
        let east = Offset { seconds: 20_700, name: "+0545".into() };
        assert_eq!(super::strftime(at(1_735_689_599), &east, "%F %T %z %Z"), "2025-01-01 05:44:59 +0545 +0545");
        let west = Offset { seconds: -12_600, name: "NST".into() };
        assert_eq!(super::strftime(at(1_735_689_600), &west, "%F %R %z"), "2024-12-31 20:30 -0330");
    }
}
