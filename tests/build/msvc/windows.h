#ifndef TE_MSVC_WINDOWS
#define TE_MSVC_WINDOWS
#include <stdarg.h>
#include <stddef.h>
/* Names that windows.h takes from everybody. */
#define far
#define near
#define FAR
#define NEAR
#define CONST const
#define VOID void
#define IN
#define OUT
#define OPTIONAL
#define small char
#define interface struct
#define pascal __stdcall
#define cdecl
#define DELETE (0x00010000L)
#define ERROR 0
#define INFINITE 0xFFFFFFFF
#define TRUE 1
#define FALSE 0
#define WINAPI __stdcall
#define CALLBACK __stdcall
#ifndef NOMINMAX
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define min(a, b) (((a) < (b)) ? (a) : (b))
#endif
#ifdef __cplusplus
extern "C" {
#endif
typedef int BOOL;
typedef unsigned char BYTE;
typedef unsigned short WORD;
typedef unsigned long DWORD;
typedef long LONG;
typedef __int64 LONG64, LONGLONG;
typedef size_t SIZE_T, ULONG_PTR, DWORD_PTR;
typedef void *HANDLE, *LPVOID, *PVOID;
typedef DWORD *LPDWORD;
typedef struct HINSTANCE__ *HMODULE;
typedef long long(WINAPI *FARPROC)(void);
typedef struct { PVOID Ptr; } SRWLOCK, CONDITION_VARIABLE;
typedef union { PVOID Ptr; } INIT_ONCE, *PINIT_ONCE;
#define SRWLOCK_INIT {0}
#define CONDITION_VARIABLE_INIT {0}
#define INIT_ONCE_STATIC_INIT {0}
typedef union { struct { DWORD LowPart; LONG HighPart; } u; LONGLONG QuadPart; } LARGE_INTEGER;
typedef struct { ULONG_PTR Internal, InternalHigh; union { struct { DWORD Offset, OffsetHigh; }; PVOID Pointer; }; HANDLE hEvent; } OVERLAPPED;
typedef struct { DWORD dwLowDateTime, dwHighDateTime; } FILETIME;
typedef struct {
    DWORD dwFileAttributes;
    FILETIME ftCreationTime, ftLastAccessTime, ftLastWriteTime;
    DWORD nFileSizeHigh, nFileSizeLow, dwReserved0, dwReserved1;
    wchar_t cFileName[260], cAlternateFileName[14];
} WIN32_FIND_DATAW;
typedef struct {
    union { DWORD dwOemId; struct { WORD wProcessorArchitecture, wReserved; }; };
    DWORD dwPageSize;
    LPVOID lpMinimumApplicationAddress, lpMaximumApplicationAddress;
    DWORD_PTR dwActiveProcessorMask;
    DWORD dwNumberOfProcessors, dwProcessorType, dwAllocationGranularity;
    WORD wProcessorLevel, wProcessorRevision;
} SYSTEM_INFO;
typedef DWORD(WINAPI *LPTHREAD_START_ROUTINE)(LPVOID);
typedef BOOL(CALLBACK *PINIT_ONCE_FN)(PINIT_ONCE, PVOID, PVOID *);
#define INVALID_HANDLE_VALUE ((HANDLE)(ULONG_PTR)-1)
#define INVALID_FILE_ATTRIBUTES ((DWORD)-1)
#define FILE_BEGIN 0
enum {
    FILE_ATTRIBUTE_DIRECTORY = 0x10, FILE_ATTRIBUTE_NORMAL = 0x80, FILE_ATTRIBUTE_REPARSE_POINT = 0x400, FILE_FLAG_BACKUP_SEMANTICS = 0x02000000,
    FILE_SHARE_READ = 1, FILE_SHARE_WRITE = 2, FILE_SHARE_DELETE = 4, CREATE_NEW = 1, CREATE_ALWAYS = 2, OPEN_EXISTING = 3, OPEN_ALWAYS = 4,
    MOVEFILE_REPLACE_EXISTING = 1, MOVEFILE_WRITE_THROUGH = 8, LOCKFILE_FAIL_IMMEDIATELY = 1, LOCKFILE_EXCLUSIVE_LOCK = 2, FORMAT_MESSAGE_IGNORE_INSERTS = 0x200,
    FORMAT_MESSAGE_FROM_SYSTEM = 0x1000, STACK_SIZE_PARAM_IS_A_RESERVATION = 0x10000, LOAD_WITH_ALTERED_SEARCH_PATH = 8, CP_UTF8 = 65001,
    FILE_TYPE_DISK = 1, FILE_TYPE_CHAR = 2, FILE_TYPE_PIPE = 3, SYNCHRONIZE = 0x100000, PROCESS_QUERY_LIMITED_INFORMATION = 0x1000, WAIT_OBJECT_0 = 0, WAIT_TIMEOUT = 258, MAX_COMPUTERNAME_LENGTH = 15,
    ERROR_FILE_NOT_FOUND = 2, ERROR_PATH_NOT_FOUND = 3, ERROR_ACCESS_DENIED = 5, ERROR_LOCK_VIOLATION = 33, ERROR_HANDLE_EOF = 38, ERROR_FILE_EXISTS = 80,
    ERROR_INVALID_PARAMETER = 87, ERROR_DISK_FULL = 112, ERROR_ALREADY_EXISTS = 183, ERROR_IO_PENDING = 997
};
#define GENERIC_READ 0x80000000L
#define GENERIC_WRITE 0x40000000L
void WINAPI InitializeSRWLock(SRWLOCK *), AcquireSRWLockExclusive(SRWLOCK *), ReleaseSRWLockExclusive(SRWLOCK *), InitializeConditionVariable(CONDITION_VARIABLE *),
    WakeConditionVariable(CONDITION_VARIABLE *), WakeAllConditionVariable(CONDITION_VARIABLE *), GetSystemInfo(SYSTEM_INFO *), Sleep(DWORD), SetLastError(DWORD);
BOOL WINAPI SleepConditionVariableSRW(CONDITION_VARIABLE *, SRWLOCK *, DWORD, DWORD), InitOnceExecuteOnce(PINIT_ONCE, PINIT_ONCE_FN, PVOID, LPVOID *),
    QueryPerformanceCounter(LARGE_INTEGER *), QueryPerformanceFrequency(LARGE_INTEGER *), CloseHandle(HANDLE), FreeLibrary(HMODULE),
    SetFilePointerEx(HANDLE, LARGE_INTEGER, LARGE_INTEGER *, DWORD),
    GetFileSizeEx(HANDLE, LARGE_INTEGER *), ReadFile(HANDLE, LPVOID, DWORD, LPDWORD, OVERLAPPED *), WriteFile(HANDLE, const void *, DWORD, LPDWORD, OVERLAPPED *),
    FlushFileBuffers(HANDLE), MoveFileExW(const wchar_t *, const wchar_t *, DWORD), DeleteFileW(const wchar_t *), CreateDirectoryW(const wchar_t *, void *),
    FindNextFileW(HANDLE, WIN32_FIND_DATAW *), FindClose(HANDLE), LockFileEx(HANDLE, DWORD, DWORD, DWORD, DWORD, OVERLAPPED *), GetComputerNameA(char *, LPDWORD);
DWORD WINAPI GetLastError(void), GetCurrentProcessId(void), WaitForSingleObject(HANDLE, DWORD), GetFileAttributesW(const wchar_t *), GetFileType(HANDLE),
    GetFinalPathNameByHandleW(HANDLE, wchar_t *, DWORD, DWORD), GetModuleFileNameW(HMODULE, wchar_t *, DWORD),
    FormatMessageW(DWORD, const void *, DWORD, DWORD, wchar_t *, DWORD, va_list *);
HANDLE WINAPI CreateThread(void *, SIZE_T, LPTHREAD_START_ROUTINE, LPVOID, DWORD, LPDWORD);
HANDLE WINAPI CreateFileW(const wchar_t *, DWORD, DWORD, void *, DWORD, DWORD, HANDLE);
HANDLE WINAPI FindFirstFileW(const wchar_t *, WIN32_FIND_DATAW *);
HANDLE WINAPI OpenProcess(DWORD, BOOL, DWORD);
HMODULE WINAPI LoadLibraryExW(const wchar_t *, HANDLE, DWORD);
FARPROC WINAPI GetProcAddress(HMODULE, const char *);
int WINAPI MultiByteToWideChar(unsigned, DWORD, const char *, int, wchar_t *, int);
int WINAPI WideCharToMultiByte(unsigned, DWORD, const wchar_t *, int, char *, int, const char *, BOOL *);
LONG64 InterlockedExchangeAdd64(LONG64 volatile *, LONG64);
LONG64 InterlockedExchange64(LONG64 volatile *, LONG64);
LONG64 InterlockedCompareExchange64(LONG64 volatile *, LONG64, LONG64);
#ifdef __cplusplus
}
#endif
#endif
